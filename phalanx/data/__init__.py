"""Data: corpora as token streams and samples, and the function (seed, samples consumed) → batch."""

from phalanx.data.batches import Batches, needs_tokenizer, open_data, sample_length
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = ["Batches", "ByteTokenizer", "Tokenizer", "load_tokenizer", "needs_tokenizer", "open_data", "sample_length"]
