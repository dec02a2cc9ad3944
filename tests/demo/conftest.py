"""A small corpus and its tokenizer, made once."""

from itertools import islice
from pathlib import Path

import pytest

from dloop.demo.corpus import Options, write_corpus
from dloop.demo.tokenizer import texts, train_tokenizer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """The files of `dloop.demo.corpus` with few conversations."""
    folder = tmp_path_factory.mktemp("small") / "corpus"
    write_corpus(Options(output_dir=folder, benchmark_prompts=2, heldout=16, prompts=16, conversations=160))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(corpus) -> Path:
    """A saved tokenizer trained on that corpus."""
    folder = corpus.parent / "tokenizer"
    train_tokenizer(islice(texts(corpus / "target_train.jsonl"), 160)).save_pretrained(folder)
    return folder
