"""An indexer that writes pages itself."""

from typing import NamedTuple

import numpy


class PagedPrefillMetadata(NamedTuple):
    owners: numpy.ndarray
    block_table: numpy.ndarray
    indices: numpy.ndarray
    indptr: numpy.ndarray
    block_size: int
    page_stride: int


def select_regions(selected, paged_prefill):
    """`selected` [rows, region_count] i64, padding at the left, the row's own region last."""
    owners, table, pages, indptr, block_size, page_stride = paged_prefill
    per_block = block_size // 8
    for row in range(len(owners)):
        for entry in range(indptr[row], indptr[row + 1]):
            region = selected[row, selected.shape[1] - (indptr[row + 1] - entry)]
            pages[entry] = table[owners[row], region // per_block] * page_stride + region % per_block
