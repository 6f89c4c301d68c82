import numpy as np
import pytest

from kvjax.train import UptrainConfig
from kvjax.train.data import batches, read_tokens


def config(**changes):
    return UptrainConfig(**{"steps": 1, "seq_len": 16, "batch": 4} | changes)


def first_tokens(data, count):
    """Which sequence each row is, for a stream that counts up."""
    return np.concatenate([next(data)[:, 0] for _ in range(count)]) // 16


def test_sequences_predict_every_token_once():
    stream = np.arange(16 * 10 + 5)
    rows = next(batches(stream, config(batch=10)))
    assert rows.dtype == np.int32
    assert rows.shape == (10, 17)
    np.testing.assert_array_equal(np.sort(rows[:, 1:].ravel()), np.arange(1, 161))
    np.testing.assert_array_equal(rows[:, 1:], rows[:, :-1] + 1)


def test_every_epoch_is_a_new_permutation_that_the_seed_decides():
    stream = np.arange(16 * 12 + 1)
    order = first_tokens(batches(stream, config()), 6)
    assert sorted(order[:12]) == sorted(order[12:]) == list(range(12))
    assert list(order[:12]) != list(order[12:])
    assert list(order[:12]) != list(range(12))
    np.testing.assert_array_equal(order, first_tokens(batches(stream, config()), 6))
    assert list(order) != list(first_tokens(batches(stream, config(seed=1)), 6))


@pytest.mark.parametrize("done", [1, 2, 4])
def test_order_goes_on_in_the_middle_of_an_epoch(done):
    stream = np.arange(16 * 10 + 1)  # 2.5 batches an epoch
    straight = first_tokens(batches(stream, config()), 9)
    stopped = batches(stream, config())
    before = first_tokens(stopped, done)
    resumed = batches(stream, config())
    resumed.set_state(stopped.get_state())
    np.testing.assert_array_equal(
        np.concatenate([before, first_tokens(resumed, 9 - done)]), straight
    )


@pytest.fixture
def model_dir(tmp_path):
    """A directory with a tokenizer that knows three words, and a start token that it would add."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"<s>": 0, "one": 1, "two": 2, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_text_becomes_one_stream(model_dir):
    (model_dir / "data.txt").write_text("one two\n\ntwo one three", "utf-8")
    tokens = read_tokens(model_dir / "data.txt", model_dir, vocab_size=4, at_least=2)
    np.testing.assert_array_equal(tokens, [1, 2, 2, 1, 3])


def test_short_text_names_file_and_counts(model_dir):
    (model_dir / "data.txt").write_text("one two", "utf-8")
    with pytest.raises(ValueError, match=r"data\.txt is too short: 2 tokens, at least 17"):
        read_tokens(model_dir / "data.txt", model_dir, vocab_size=4, at_least=17)


def test_what_is_not_utf8_is_refused(model_dir):
    (model_dir / "data.txt").write_bytes("één".encode("latin-1"))
    with pytest.raises(ValueError, match=r"data\.txt is not UTF-8 text"):
        read_tokens(model_dir / "data.txt", model_dir, vocab_size=4, at_least=1)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "<u2"), (2**16 + 1, "<u4")])
def test_token_ids_are_mapped(tmp_path, vocab_size, dtype):
    ids = np.array([3, 1, 65535, 0])
    ids.astype(dtype).tofile(tmp_path / "ids.bin")
    np.save(tmp_path / "ids.npy", ids)
    for name in ("ids.bin", "ids.npy"):
        tokens = read_tokens(tmp_path / name, tmp_path, vocab_size, at_least=4)
        assert isinstance(tokens, np.memmap)
        np.testing.assert_array_equal(tokens, ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1, 2, 61]), "has token ids 1 to 61; the model's are 0 to 60"),
        (np.array([1, -1]), "has token ids -1 to 1"),
        (np.ones((2, 3), np.int32), r"int32\[2, 3\]: a 1-D array of integers"),
        (np.ones(3), r"float64\[3\]: a 1-D array of integers"),
        (np.zeros(0, np.int32), "too short: 0 tokens, at least 2"),
    ],
)
def test_arrays_that_are_no_token_ids_are_refused(tmp_path, ids, message):
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(ValueError, match=rf"ids\.npy.* {message}"):
        read_tokens(tmp_path / "ids.npy", tmp_path, vocab_size=61, at_least=2)


@pytest.mark.parametrize(("size", "message"), [(3, "3 bytes"), (0, "0 tokens, at least 2")])
def test_broken_id_files_are_refused(tmp_path, size, message):
    (tmp_path / "ids.bin").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=message):
        read_tokens(tmp_path / "ids.bin", tmp_path, vocab_size=61, at_least=2)
