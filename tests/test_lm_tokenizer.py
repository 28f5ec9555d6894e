"""Text to ids and back over a tokenizer that is only read."""

from __future__ import annotations

import pytest
from lm_helpers import EOS, NAMED, PROMPTS, ROWS, byte_tokenizer, llama, save_model
from torch import nn

from textenv.lm import TextTokenizer, load_tokenizer


def settings_of(tokenizer):
    names = ("padding_side", "truncation_side", "pad_token", "eos_token", "bos_token")
    return [getattr(tokenizer, name) for name in names] + [tokenizer.backend_tokenizer.to_str()]


def test_settings_of_a_tokenizer_are_read_and_never_changed():
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "right"
    before = settings_of(tokenizer)
    text = TextTokenizer(tokenizer)
    text.decode_batch([text.encode("the good"), [EOS]])
    text.ids_of(["good"])
    assert text.pad_id == EOS and settings_of(tokenizer) == before


def test_tokenizer_without_a_padding_token_gets_none():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    text = TextTokenizer(tokenizer, stop_ids=[7])
    assert text.pad_id == 7 and tokenizer.pad_token is None
    assert TextTokenizer(tokenizer, stop_ids=[]).pad_id == 0


def test_stop_ids_come_from_tokenizer_config_and_generation_config(tmp_path):
    folder = save_model(tmp_path / "three-stops", llama(eos_token_id=[EOS, 5]), {"eos_token_id": [5, 9]})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stop_ids == (EOS, 5, 9)
    assert (tokenizer.vocab_size, tokenizer.named_size, tokenizer.context_length) == (ROWS, NAMED, 128)


def test_generation_config_is_optional(tmp_path):
    folder = save_model(tmp_path / "model", llama())
    (tmp_path / "model" / "generation_config.json").unlink()
    assert load_tokenizer(folder).stop_ids == (EOS,)


@pytest.mark.parametrize("text", ["the good", "<bos>the good", "<bos><bos>the good"])
def test_exactly_one_bos(text):
    """With a text that does not carry it, and with one whose template does already."""
    tokenizer = byte_tokenizer(bos=True)
    encoded = TextTokenizer(tokenizer).encode(text)
    assert encoded.count(tokenizer.bos_token_id) == 1 and encoded[0] == tokenizer.bos_token_id
    assert TextTokenizer(tokenizer).decode(encoded) == "the good"


def test_no_bos_where_the_tokenizer_uses_none():
    assert TextTokenizer(byte_tokenizer()).encode("th") == byte_tokenizer()("th").input_ids
    assert len(TextTokenizer(byte_tokenizer()).encode("th")) == 1


def test_an_eos_that_the_tokenizer_appends_is_taken_off():
    """A prompt that ends with EOS would tell the model that the text is over."""
    tokenizer = byte_tokenizer(appends_eos=True)
    assert tokenizer("good").input_ids[-1] == EOS
    assert TextTokenizer(tokenizer).encode("good") == byte_tokenizer()("good").input_ids
    assert TextTokenizer(byte_tokenizer()).encode("good<eos>")[-1] == EOS  # written by the user: stays


def test_decoding_leaves_out_special_and_unnamed_ids():
    text = TextTokenizer(byte_tokenizer(), vocab_size=ROWS)
    ids = text.encode("the good")
    assert text.decode([EOS, *ids, ROWS - 1, EOS]) == "the good"
    assert text.decode_batch([ids, [], [EOS]]) == ["the good", "", ""]
    assert text.special_ids == {EOS}


def test_decoding_then_encoding_can_change_ids():
    """`t`, `h` and `the` less `e`: why training keeps the ids that were sampled."""
    text = TextTokenizer(byte_tokenizer())
    letters = [text.encode(letter)[0] for letter in "the"]
    assert text.encode(text.decode(letters)) == text.encode("the") != letters


def test_texts_to_stop_at():
    text = TextTokenizer(byte_tokenizer())
    assert text.ids_of([]) == ()
    assert text.ids_of(["."]) == tuple(text.encode("."))
    assert text.ids_of(["!", "."]) == tuple(sorted([*text.encode("."), *text.encode("!")]))
    assert text.ids_of(["good", "good"]) == tuple(text.encode("good"))


def test_texts_that_no_token_spells_cannot_stop_anything():
    with pytest.raises(ValueError, match="one token each, got 'tho', which no token"):
        TextTokenizer(byte_tokenizer()).ids_of([".", "tho"])


def spaced_tokenizer():
    """Pieces with space around them, as real vocabularies have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = ["<eos>", *(split.pre_tokenize_str(piece)[0][0] for piece in (".", " .", ".\n", "\n", "\n\n", " ", "end"))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"))


@pytest.mark.parametrize(
    "wanted, ids",
    [
        (".", (1, 2, 3)),  # with whatever space around it
        (" .", (2,)),
        ("\n", (4,)),  # space itself is taken literally
        ("\n\n", (5,)),
        ("end", (7,)),
        ("<eos>", (0,)),  # special tokens too
    ],
)
def test_stops_with_space_around_them_and_stops_that_are_space(wanted, ids):
    assert spaced_tokenizer().ids_of([wanted]) == ids


def test_an_empty_stop_is_no_token():
    with pytest.raises(ValueError, match="got ''"):
        spaced_tokenizer().ids_of([""])


def test_prompts_of_the_helpers_are_ragged():
    """Guards the other tests: equal lengths would hide padding faults."""
    text = TextTokenizer(byte_tokenizer())
    assert len({len(text.encode(prompt)) for prompt in PROMPTS}) == len(PROMPTS)


def test_embedding_rows_reach_beyond_the_tokenizer():
    assert ROWS > NAMED == len(byte_tokenizer()) and isinstance(llama().get_input_embeddings(), nn.Embedding)
