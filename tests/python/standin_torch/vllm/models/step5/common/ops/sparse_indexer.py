"""The record of an indexer that writes pages itself."""

from typing import NamedTuple

import torch


class PagedPrefillMetadata(NamedTuple):
    owners: torch.Tensor
    block_table: torch.Tensor
    indices: torch.Tensor
    indptr: torch.Tensor
    block_size: int
    page_stride: int
