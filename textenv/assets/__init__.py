"""Data files of the package: human ratings, prompt openings and the reward head learned from them (see README.md)."""
