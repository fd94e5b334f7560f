"""Machines by name: published figures, their sources, and what a name may say."""

import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recshard_lab import Topology
from recshard_lab.sharding import preset_names, preset_table
from recshard_lab.sharding.hardware.machines import ALIASES, MACHINES
from tests.refusals import not_refused


def test_every_preset_is_a_topology_of_one_host_and_other_spellings_are_the_same_machine() -> None:
    for name in preset_names():
        topology = Topology.preset(name)
        assert topology.num_nodes == 1, name
        assert topology.memory_cap_bytes > 0, name
    assert [alias for alias, name in ALIASES.items() if Topology.preset(alias) != Topology.preset(name)] == []


def test_every_figure_says_where_and_when_it_was_published_or_that_it_is_assumed() -> None:
    known = {spec.name for spec in fields(Topology)}
    for figure in (figure for machine in MACHINES for figure in machine.figures):
        assert figure.field in known
        assert figure.source.startswith("assumed") or re.search(r"\b20\d\d\b", figure.source), figure
        if figure.share != 1:
            assert 0 < figure.share < 1
            assert figure.share_source.startswith("assumed") or re.search(r"\b20\d\d\b", figure.share_source), figure


PUBLISHED = [  # what the makers print for the whole machine, NVLink in both directions
    ("v100", "hbm_cap", 256e9), ("dgx-2", "hbm_cap", 512e9), ("dgx-2", "hbm_mem_bw", 14.4e12 / 1000),
    ("a100", "hbm_cap", 640e9), ("h100", "hbm_cap", 640e9), ("h200", "hbm_cap", 1128e9),
    ("h100", "hbm_mem_bw", 26.8e12 / 1000), ("h100", "intra_host_bw", 7.2e12 / 1000 / 2),
    ("a100", "intra_host_bw", 4.8e12 / 1000 / 2), ("gb200nvl72", "hbm_cap", 13.4e12),
    ("gb200nvl72", "hbm_mem_bw", 576e12 / 1000), ("gb200nvl72", "intra_host_bw", 130e12 / 1000 / 2),
    ("aws-p4d", "inter_host_bw", 400e9 / 8 / 1000), ("aws-p5", "inter_host_bw", 3200e9 / 8 / 1000),
    ("azure-nd-h100-v5", "inter_host_bw", 3.2e12 / 8 / 1000),
]  # fmt: skip


def test_the_ranks_of_a_host_add_up_to_what_is_printed_for_the_host() -> None:
    for name, field, whole in PUBLISHED:
        peaks = {row["field"]: row["peak"] for row in preset_table(name).records()}
        assert peaks[field] * Topology.preset(name).world_size == pytest.approx(whole, rel=0.005), (name, field)


def test_the_table_holds_what_the_topology_was_given() -> None:
    for name in (machine.name for machine in MACHINES if not machine.one_host):
        topology = Topology.preset(name)
        for row in preset_table(name).records():
            assert getattr(topology, row["field"]) == row["value"] <= row["peak"], (name, row)


def test_a_number_is_ranks_in_hosts_of_the_usual_size() -> None:
    found = [(t.world_size, t.num_nodes) for t in map(Topology.preset, ("h100x64", "h100x4", "gb200nvl72x144"))]
    assert found == [(64, 8), (4, 1), (144, 2)]
    assert Topology.preset("P5.48xlargeX16") == Topology.preset("aws-p5", world_size=16)


def test_any_figure_can_be_given_instead() -> None:
    given = {"hbm_cap": 7, "intra_host_bw": 3.0, "launch_ms": 0.5, "reserve_fraction": 0.4, "local_world_size": 3}
    topology = Topology.preset("h100x12", **given)
    assert {name: getattr(topology, name) for name in given} == given
    assert topology.hbm_mem_bw == Topology.preset("h100").hbm_mem_bw


def test_a_laptops_memory_is_shared_by_its_ranks() -> None:
    two, eight = Topology.preset("cpu-laptopx2"), Topology.preset("cpu-laptopx8")
    assert two.compute_device == eight.compute_device == "cpu"
    assert 2 * two.ddr_cap == 8 * eight.ddr_cap == 16e9


def test_a_name_that_says_nothing_is_refused_with_the_nearest() -> None:
    refusals: list[tuple[Any, str]] = [
        (lambda: Topology.preset("h10x8"), "did you mean 'h100x8'"),
        (lambda: Topology.preset("gb200nvl"), "did you mean 'gb200nvl72'"),
        (lambda: Topology.preset(""), "topology preset '' does not exist"),
        (lambda: Topology.preset("h100x12"), "use h100x8 or h100x16"),
        (lambda: Topology.preset("h100x0"), "N at least 1"),
        (lambda: Topology.preset("h100x8", world_size=16), "has 8 ranks, but world_size is 16"),
        (lambda: Topology.preset("h100", world_size=0), "positive integer, got 0"),
        (lambda: Topology.preset("h100", hbm_capp=1), "did you mean 'hbm_cap'"),
        (lambda: Topology.preset("h100", world_size="many"), "world_size must be"),  # type: ignore[arg-type]
        (lambda: Topology.preset(8), "name must be str, got 8"),  # type: ignore[arg-type]
        (lambda: preset_table("this"), "this machine"),
    ]
    assert not_refused(refusals) == []


def test_this_is_the_machine_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Topology.preset("thisx3") == Topology(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert Topology.preset("this") == Topology.preset("h100x4", hbm_cap=85_000_000_000)
    found.name = "a GPU that is not listed"
    assert Topology.preset("this") == Topology(4, compute_device="cuda", hbm_cap=85_000_000_000)


def test_the_tables_fit_a_hundred_columns() -> None:
    for table in (preset_table(), *(preset_table(machine.name) for machine in MACHINES)):
        assert max(map(len, str(table).splitlines())) <= 100
    assert "nccl-tests issue 212" in str(preset_table("h100x8"))
