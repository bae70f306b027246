"""What attention and writes touch: nothing past the end of any tensor, and no new memory where it was given some."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import torch_backend, triton_backend
from kernels.triton_backend.attention import plan_attention
from kernels.triton_backend.launch import Launch
from tests.kernels.device import DEVICE
from tests.kernels.memory import walled
from tests.kernels.scene import EIGHT_BITS, Scene
from tests.kernels.ways import Way, table_choice

on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="pages of a device can not be walled off from here")


def survives(work: Callable[..., object], **arguments: Any) -> bool:
    """Whether a child process gets to the end of some work; one that touches a walled page does not."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            work(**arguments)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def walled_in(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: walled(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


@on_cpu
def test_a_wall_is_a_wall() -> None:
    row = walled(torch.ones(24))
    assert survives(row.sum)
    assert not survives(row.as_strided((40,), (1,)).sum)


@on_cpu
@pytest.mark.parametrize(
    ("dims", "cache"), [((64, 64), torch.float32), *(((24, 40), cache) for cache in (torch.float32, *EIGHT_BITS))]
)
@pytest.mark.parametrize("options", [{}, {"window": 11}])
def test_nothing_past_the_end_of_a_tensor_is_touched(
    attend: Way, dims: tuple[int, int], cache: torch.dtype, options: dict[str, Any]
) -> None:
    """Tables of exactly the entries that contexts need, fewer than a tile of keys has; the last slot that is read is
    the last of the pool; and all is walled in."""
    for lengths in ([(1, 33), (1, 40)], [(1, 33), (5, 40)]):
        scene = Scene(lengths, dims=dims, block_tokens=8, cache=cache)
        block, last = int(scene.tables[1, 4]), len(scene.k_blocks) - 1
        for name in ("k_blocks", "v_blocks", "k_scales", "v_scales"):
            pool = getattr(scene, name)
            if pool is not None:
                pool[[block, last]] = pool[[last, block]]
        scene.tables = torch.where(scene.tables == last, block, scene.tables)[:, :5].clone()
        scene.tables[1, 4] = last
        lse = torch.full(scene.q.shape[:2], torch.nan)
        expected = attend(**scene.arguments(), **options, lse=lse)
        arguments = walled_in(scene.arguments())
        out, other_lse = walled(torch.full_like(expected, torch.nan)), walled(torch.full_like(lse, torch.nan))
        sunk = walled(torch.zeros(3))
        assert survives(attend, **arguments, **options, out=out, lse=other_lse, sinks=sunk)
        assert torch.equal(attend(**arguments, **options, out=out, lse=other_lse), expected)
        assert torch.equal(other_lse, lse)


@on_cpu
@pytest.mark.parametrize("cache", [torch.float32, torch.float16, *EIGHT_BITS])
def test_nothing_past_the_end_is_written_either(kernels: Any, cache: torch.dtype) -> None:
    scene = Scene([(1, 33)], heads=(3, 3), dims=(24, 40), cache=cache)
    new = {"k": torch.randn(3, 3, 24), "v": torch.randn(3, 3, 40), "slots": torch.tensor([0, -1, 16 * 6 - 1])}
    assert len(scene.k_blocks) == 6
    pools = {name: getattr(scene, name) for name in ("k_blocks", "v_blocks", "k_scales", "v_scales")}
    arguments = walled_in(new | pools)
    assert survives(kernels.write_kv, **arguments)


class Allocations(TorchDispatchMode):
    """Names of the operations that give a tensor which is no view of one that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.names.append(str(func))
        return result


def test_triton_allocates_nothing_where_out_and_workspace_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches aside, which the interpreter makes copies for."""
    monkeypatch.setattr(Launch, "run", lambda launch: None)
    scene = Scene([(1, 40), (3, 30)], cache=torch.int8)
    arguments = scene.arguments() | {"max_context_tokens": 100_000, "window": 60}
    out, lse = torch.empty_like(scene.q), torch.empty(scene.q.shape[:2], device=DEVICE)
    workspace = torch.empty(workspace_bytes(scene, 100_000), dtype=torch.uint8, device=DEVICE)
    with Allocations() as allocations:
        triton_backend.paged_attention(**arguments, out=out, lse=lse, workspace=workspace)
    assert allocations.names == []
    with Allocations() as allocations:
        triton_backend.paged_attention(**arguments)
    assert len(allocations.names) == 2  # so it does count
    with Allocations() as allocations:
        new = torch.randn(2, 1, 16, device=DEVICE)
        slots = torch.tensor([0, 1], device=DEVICE)
        before = len(allocations.names)
        triton_backend.write_kv(new, new, scene.k_blocks, scene.v_blocks, slots, scene.k_scales, scene.v_scales)
        assert len(allocations.names) == before


def workspace_bytes(scene: Scene, max_context_tokens: int) -> int:
    return triton_backend.attention_workspace(
        tokens=len(scene.q), sequences=len(scene.lengths), query_heads=scene.heads[0], value_dim=scene.dims[1],
        max_context_tokens=max_context_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 700, 5000])
def test_the_workspace_that_is_named_holds_all_partial_results(window: int | None) -> None:
    for dims, heads in (((64, 64), (9, 3)), ((192, 128), (71, 1)), ((8, 8), (8, 8))):
        scene = Scene([(1, 4), (2, 4)], dims=dims, heads=heads)
        for context in (1, 500, 512, 513, 1000, 4096, 4097, 131_072):
            workspace = torch.empty(workspace_bytes(scene, context), dtype=torch.uint8, device=DEVICE)
            options = {"causal": True, "window": window, "soft_cap": None, "sinks": None, "lse": None}
            launches = plan_attention(
                **scene.arguments() | {"max_context_tokens": context}, **options, choice=table_choice(scene),
                out=torch.empty(3, heads[0], dims[1], device=DEVICE), workspace=workspace,
            )  # fmt: skip
            splits = launches[1].arguments["splits"]
            assert splits == launches[1].grid[2]
            if splits > 1:
                assert launches[1].arguments["partial_out"].numel() == 2 * heads[0] * splits * dims[1]
                assert launches[1].arguments["partial_lse"].numel() >= 2 * heads[0] * splits


def test_a_workspace_that_will_not_do_is_refused_with_the_numbers() -> None:
    scene = Scene([(1, 40)])
    arguments = scene.arguments() | {"max_context_tokens": 20_000}
    needed = workspace_bytes(scene, 20_000)
    some = torch.empty(needed + 64, dtype=torch.uint8, device=DEVICE)
    for workspace in (some[: needed - 1], some[:needed].view(torch.float32), some[: needed // 2 * 2 : 2]):
        message = f"contiguous uint8 of at least {needed} bytes, not {workspace.dtype} of {workspace.nbytes}"
        with pytest.raises(ValueError, match=message):
            triton_backend.paged_attention(**arguments, workspace=workspace)
    triton_backend.paged_attention(**arguments, workspace=some[:needed])


def test_a_workspace_may_have_any_dims() -> None:
    scene = Scene([(1, 600)], heads=(2, 1))
    flat = torch.empty(workspace_bytes(scene, 600), dtype=torch.uint8, device=DEVICE)
    expected = triton_backend.paged_attention(**scene.arguments(), workspace=flat)
    assert torch.equal(triton_backend.paged_attention(**scene.arguments(), workspace=flat.view(1, -1)), expected)


def test_the_workspace_is_only_that_of_the_splits() -> None:
    """Contexts within one split need none, and PyTorch never does."""
    shape = {"tokens": 32, "sequences": 32, "query_heads": 9, "value_dim": 64}
    assert triton_backend.attention_workspace(**shape, max_context_tokens=0) == 0
    assert triton_backend.attention_workspace(**shape, max_context_tokens=64) == 0
    assert triton_backend.attention_workspace(**shape, max_context_tokens=131_072) > 0
    assert torch_backend.attention_workspace(**shape, max_context_tokens=131_072) == 0
