"""What engines refuse, and how they lay ranks out; no process is started."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from recshard_lab.launcher import LaunchError, launch
from recshard_lab.launcher.engines.ray_cluster import layout
from recshard_lab.launcher.shape import Shape

SMALL, LARGE = {"CPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install 'recshard-lab\[ray\]'"):
        launch(2, engine="ray")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:none"])
def test_an_address_where_nobody_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(LaunchError, match=r"no Ray cluster answers there .*ray start --head"):
        launch(2, engine="ray", address=address)


def ray_shape(n: int, nodes: int = 1, backend: str = "gloo", threads: int = 1) -> Shape:
    return Shape(n, nodes, backend, threads, "ray")


@pytest.mark.parametrize(
    ("shape", "machines", "hosts"),
    [
        (ray_shape(8), [SMALL, SMALL], 1),  # as few as hold them
        (ray_shape(16), [SMALL, SMALL], 2),
        (ray_shape(16), [SMALL, SMALL, LARGE], 1),
        (ray_shape(8, threads=2), [SMALL, SMALL], 2),
        (ray_shape(12), [SMALL, SMALL, SMALL], 2),
        (ray_shape(18), [SMALL, SMALL, SMALL], 3),
        (ray_shape(4, nodes=2), [SMALL, SMALL], 2),  # machines where there are as many
        (ray_shape(4, nodes=2), [SMALL], 1),  # virtual nodes otherwise
        (ray_shape(8, backend="nccl"), [SMALL, LARGE, LARGE], 2),
    ],
)
def test_ranks_go_in_equal_shares_to_as_few_machines_as_hold_them(
    shape: Shape, machines: list[dict[str, float]], hosts: int
) -> None:
    assert layout(shape, machines) == hosts


def test_ranks_that_no_equal_shares_can_hold_are_refused_with_what_there_is() -> None:
    with pytest.raises(LaunchError, match=r"n=17, .*8 CPUs 0 GPUs, 16 CPUs 4 GPUs"):
        layout(ray_shape(17), [SMALL, LARGE])
