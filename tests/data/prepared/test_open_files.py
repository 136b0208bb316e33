"""However many parts there are, few files are open at once: 1,024 may be, and a terabyte is 30,000 parts."""

from __future__ import annotations

import os
import pickle
import resource
import traceback
from multiprocessing import get_context

import numpy as np
import pytest

from pipeline.cli.inspect_view import read_hashes, read_lengths
from pipeline.data.packing import join_datasets, pack_documents
from pipeline.data.prepared.encoder import TokenizedDocument
from pipeline.data.prepared.part_files import PartWriter, TokenStore

pytestmark = pytest.mark.slow

PARTS = 150


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("parts")
    made = []
    for number in range(PARTS):
        ids = np.arange(number, number + 40, dtype=np.uint16)
        (root / str(number)).mkdir()
        writer = PartWriter(root / str(number), np.dtype("<u2"), has_loss_mask=True)
        writer.append([TokenizedDocument(ids, ids % 3 != 0, str(number).encode())], 0.0)
        writer.finish({"identity": {"format": 1}})
        made.append(root / str(number))
    return made


def everything_of(folders) -> list[int]:
    """Sums over all rows, for every way to fill them, and over the documents' counts."""
    store = TokenStore(folders, "train")
    found = [len(read_hashes([store])), int(read_lengths([store]).sum())]
    streams = [
        pack_documents(TokenStore(half, "train"), "concatenate", 8, True, 9)
        for half in (folders[::2], folders[1::2])
    ]
    datasets = [pack_documents(store, packing, 8, True, 9) for packing in ("concatenate", "best_fit", "none")]
    for dataset in [*datasets, join_datasets(streams), pickle.loads(pickle.dumps(datasets[0]))]:
        order = np.random.default_rng(0).permutation(len(dataset)).tolist()
        for start in range(0, len(order), 50):
            batch = dataset.__getitems__(order[start : start + 50])
            found += [int(tensor.sum()) for tensor in batch.values()]
    return found


def under_a_limit(folders, connection) -> None:
    try:
        limit = len(os.listdir("/proc/self/fd")) + 120
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        connection.send(everything_of(folders))
    except BaseException:
        connection.send(traceback.format_exc())


def test_more_parts_than_files_may_be_open(folders):
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=under_a_limit, args=(folders, theirs))
    process.start()
    found = ours.recv()
    process.join()
    assert found == everything_of(folders)
