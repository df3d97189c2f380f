"""The packed token stream: what is written comes back, documents keep their boundaries, the cache is safe."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.stream import GrowingStream, TokenStream, build_stream, open_array, token_dtype
from phalanx.errors import DataError

DOCUMENTS = st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=12)


def pieces(documents):
    return iter([(np.asarray(document, np.uint32), True) for document in documents])


def build(cache, documents, key="k", vocab_size=256):
    return build_stream(cache, key, vocab_size, lambda: pieces(documents), [])


@given(documents=DOCUMENTS, length=st.integers(1, 6))
def test_windows_cover_the_documents_end_to_end(tmp_path_factory, documents, length):
    stream, _ = build(tmp_path_factory.mktemp("cache"), documents)
    flat = [token for document in documents for token in document]
    assert stream.tokens.tolist() == flat
    count = len(flat) // length
    if count:
        windows = stream.windows(np.arange(count), length)
        assert windows.dtype == np.int64
        assert windows.reshape(-1).tolist() == flat[: count * length]


@given(documents=DOCUMENTS, length=st.integers(1, 6))
def test_documents_start_where_they_were_written_and_at_every_window(documents, length):
    lengths = [len(document) for document in documents if document]
    tokens, ends = np.zeros(sum(lengths), np.uint16), np.cumsum(lengths, dtype=np.int64)
    count = len(tokens) // length
    if count:
        starts = TokenStream(tokens, ends).starts(np.arange(count), length)
        offsets = {0, *ends.tolist(), *range(0, len(tokens), length)}
        assert np.flatnonzero(starts).tolist() == sorted(o for o in offsets if o < count * length)


def test_a_document_in_several_pieces_is_one_document(tmp_path):
    parts = iter([(np.asarray([1, 2]), False), (np.asarray([3]), True), (np.asarray([4]), True)])
    stream, _ = build_stream(tmp_path, "k", 256, lambda: parts, [])
    assert stream.ends.tolist() == [3, 4]


def test_a_stream_is_built_once_and_then_read_from_the_cache(tmp_path):
    build(tmp_path, [[1, 2, 3]])

    def fail():
        raise AssertionError("built again")

    stream, _ = build_stream(tmp_path, "k", 256, fail, [])
    assert stream.tokens.tolist() == [1, 2, 3]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    def broken():
        yield np.asarray([1]), True
        raise DataError("broken")

    with pytest.raises(DataError):
        build_stream(tmp_path, "k", 256, broken, [])
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be kept in .*file.*: Not a directory") as refused:
        build(tmp_path / "file" / "cache", [[1, 2, 3]])
    assert "PHALANX_CACHE" in refused.value.hint
    with pytest.raises(DataError, match="cannot be kept in"):
        GrowingStream(tmp_path / "file" / "cache", 256, iter([]))


def test_a_damaged_stream_is_built_again(tmp_path):
    build(tmp_path, [[1, 2, 3]])
    (tmp_path / "stream-k" / "tokens.bin").write_bytes(b"\0\0")
    gc.collect()
    stream, _ = build(tmp_path, [[1, 2, 3]])
    assert stream.tokens.tolist() == [1, 2, 3]


def test_two_builders_of_the_same_stream_do_not_disturb_each_other(tmp_path):
    def slow():
        build(tmp_path, [[1, 2]])
        yield from pieces([[1, 2]])

    stream, _ = build_stream(tmp_path, "k", 256, slow, [])
    assert stream.tokens.tolist() == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["stream-k"]


def test_what_was_skipped_is_remembered_with_the_stream(tmp_path):
    skipped = []

    def some():
        skipped.append("a.txt: bad")
        yield np.asarray([1]), True

    build_stream(tmp_path, "k", 256, some, skipped)
    assert build(tmp_path, [])[1] == ["a.txt: bad"]


def test_ids_are_stored_in_the_smallest_dtype_that_holds_the_vocabulary(tmp_path):
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32
    stream, _ = build(tmp_path, [[70000]], vocab_size=80000)
    assert stream.tokens.tolist() == [70000]


def test_a_growing_stream_reads_no_further_than_asked(tmp_path):
    taken = []

    def source():
        for i in range(100):
            taken.append(i)
            yield np.asarray([i, i]), True

    stream = GrowingStream(tmp_path, 256, source())
    assert stream.read(5).tokens.tolist() == [0, 0, 1, 1, 2, 2]
    assert len(taken) == 3
    assert not stream.exhausted
    assert len(stream.read(10**6).tokens) == 200
    assert stream.exhausted
    assert stream.read(0).ends.tolist() == list(range(2, 201, 2))


def test_the_spool_of_a_growing_stream_is_removed_with_it(tmp_path):
    stream = GrowingStream(tmp_path, 256, pieces([[1]]))
    stream.read(1)
    assert len(list(tmp_path.iterdir())) == 1
    del stream
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_one_dimensional_array_is_a_stream_and_a_two_dimensional_one_rows(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.int64))
    np.save(tmp_path / "b.npy", np.arange(12, dtype=np.uint16).reshape(3, 4))
    assert len(open_array(tmp_path / "a.npy", vocab_size=100, tokens=4).tokens) == 10
    rows = open_array(tmp_path / "b.npy", vocab_size=100, tokens=4).windows(np.asarray([2]), 4)
    assert rows.tolist() == [[8, 9, 10, 11]]


def test_a_raw_array_is_read_in_the_dtype_of_the_vocabulary(tmp_path):
    np.arange(6, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.arange(6, dtype=np.uint32).tofile(tmp_path / "b.bin")
    assert open_array(tmp_path / "a.bin", vocab_size=100, tokens=2).tokens.tolist() == list(range(6))
    assert open_array(tmp_path / "b.bin", vocab_size=100_000, tokens=2).tokens.tolist() == list(range(6))


def test_an_array_that_is_not_token_ids_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 2), np.int64))
    np.save(tmp_path / "b.npy", np.zeros(4, np.float32))
    (tmp_path / "c.npy").write_bytes(b"nothing")
    for name, reason in (
        ("a", r"shape \[2, 2, 2\], not token ids"),
        ("b", "float32"),
        ("c", "cannot be read as an array"),
    ):
        with pytest.raises(DataError, match=reason):
            open_array(tmp_path / f"{name}.npy", vocab_size=100, tokens=2)


def test_rows_of_another_length_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 5), np.int64))
    with pytest.raises(DataError, match=r"have 5 tokens, but a sample has 4(.|\n)*set the sample length to 5"):
        open_array(tmp_path / "a.npy", vocab_size=100, tokens=4)
