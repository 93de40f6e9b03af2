"""What compiled kernels may be given: any strides are encoded right, and what they cannot read or
write is refused by type, never misread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.collectives.codecs import native
from atoll.collectives.codecs.codec import CODECS, Chunking, get_codec
from atoll.collectives.codecs.encoded import EncodedVector
from atoll.collectives.errors import LocalProtocolError
from atoll.security.rules.native import KERNEL

N = 5000  # whole blocks, whole tiles, and a rest
compiled = pytest.mark.skipif(native.KERNELS is None, reason="no C compiler at installation")


def odd_views(n: int) -> Iterator[tuple[str, Tensor]]:
    """The same values in memory that is not one float32 after another."""
    torch.manual_seed(3)
    x = torch.randn(n)
    column = torch.full((n, 3), 7.0)
    column[:, 1] = x
    yield "a column", column[:, 1]
    other = torch.full((2 * n,), -9.0)
    other[::2] = x
    yield "every other", other[::2]
    yield "reversed rows", x.reshape(-1, 2).t().contiguous().t().reshape(-1)
    yield "one value", x[:1].expand(n)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "bits"])
def test_strided_values_are_encoded_as_their_copy_is(name: str) -> None:
    codec = get_codec(name)
    for what, view in odd_views(N):
        plain, strided = bytearray(codec.wire_bytes(N)), bytearray(codec.wire_bytes(N))
        assert codec.encode(
            view.clone(memory_format=torch.contiguous_format), codec.wire(memoryview(plain), N)
        )
        assert codec.encode(view, codec.wire(memoryview(strided), N))
        assert plain == strided, what


@compiled
@pytest.mark.parametrize("name", ["fp32", "int8", "stat2", "sparse64"])
def test_a_kernel_refuses_what_it_would_misread(name: str) -> None:
    codec = get_codec(name)
    wire = codec.wire(memoryview(bytearray(codec.wire_bytes(N))), N)
    assert codec.encode(torch.ones(N), wire)
    for x in (
        torch.ones(N, dtype=torch.float64),
        torch.ones(N - 1),
        torch.ones(N, dtype=torch.float16),
    ):
        with pytest.raises(LocalProtocolError, match="contiguous float32"):
            codec.encode(x, wire)
    before = torch.full((2 * N,), 3.0)
    with pytest.raises(LocalProtocolError, match="strides"):
        codec.decode(wire, before[::2], cold=True)
    assert bool((before == 3.0).all())  # nothing was written
    for out in (torch.zeros(N, dtype=torch.float64), torch.zeros(N + 1), torch.zeros(N // 2)):
        with pytest.raises(LocalProtocolError, match="contiguous float32"):
            codec.decode(wire, out, cold=True)


@compiled
def test_bytes_that_are_not_aligned_are_no_wire() -> None:
    for name in ("fp32", "int8", "stat2"):
        codec = get_codec(name)
        data = memoryview(bytearray(codec.wire_bytes(N) + 1))[1:]
        with pytest.raises(ValueError, match="aligned"):
            codec.wire(data, N)


@pytest.mark.parametrize("name", ["fp32", "int8", "stat2"])
def test_a_whole_strided_vector(name: str) -> None:
    for _, view in odd_views(N):
        chunking = Chunking(name, N, 1024)
        data = [bytearray(chunking.nbytes), bytearray(chunking.nbytes)]
        plain, strided = (EncodedVector(chunking, memoryview(each)) for each in data)
        assert plain.encode(view.clone(memory_format=torch.contiguous_format))
        assert strided.encode(view)
        assert data[0] == data[1]


@pytest.mark.skipif(KERNEL is None, reason="no C compiler at installation")
def test_kernels_of_rules_refuse_what_they_would_misread() -> None:
    assert KERNEL is not None
    kernel, rows = KERNEL, torch.randn(5, 300)
    steps, out = [0, 1], torch.empty(300)
    calls: list[Callable[[Tensor], object]] = [
        lambda x: kernel.squares(x, None),
        lambda x: kernel.clip(x, 1.0),
        kernel.triangle,
        lambda x: kernel.sorted_mean(x, steps, 0, 5, 5, out),
    ]
    for call in calls:
        for wrong in (rows.double(), rows.half(), rows.t(), rows[:, ::2], rows[0]):
            with pytest.raises(LocalProtocolError, match="float32 rows on the CPU"):
                call(wrong)
    with pytest.raises(LocalProtocolError):
        kernel.squares(rows, torch.zeros(299))
    with pytest.raises(LocalProtocolError):
        kernel.sorted_mean(rows, steps, 0, 5, 5, torch.empty(600)[::2])
    wide = torch.randn(5, 400)
    np.testing.assert_array_equal(
        kernel.squares(wide[:, :300], None), kernel.squares(wide[:, :300].contiguous(), None)
    )


@pytest.mark.skipif(KERNEL is None, reason="no C compiler at installation")
def test_the_scratch_of_a_kernel_is_float32_whatever_torch_makes_by_default() -> None:
    assert KERNEL is not None
    rows, first, second = torch.randn(3, 200), torch.empty(200), torch.empty(200)
    KERNEL.sorted_mean(rows, [0, 1, 1, 2, 0, 1], 1, 2, 1, first)
    torch.set_default_dtype(torch.float64)
    try:
        KERNEL.sorted_mean(rows, [0, 1, 1, 2, 0, 1], 1, 2, 1, second)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(first, second)
