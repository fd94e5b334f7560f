"""Machines by name: published figures, their sources, and what a name may say."""

import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from recshard_lab import Topology
from recshard_lab.sharding import preset_names, preset_table
from recshard_lab.sharding.hardware.machines import ALIASES, MACHINES


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_topology_of_one_host(name: str) -> None:
    topology = Topology.preset(name)
    assert topology.num_nodes == 1
    assert topology.memory_cap_bytes > 0


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_figure_says_where_and_when_it_was_published_or_that_it_is_assumed(machine) -> None:
    for figure in machine.figures:
        assert figure.field in {spec.name for spec in fields(Topology)}
        assert figure.source.startswith("assumed") or re.search(r"\b20\d\d\b", figure.source), figure
        if figure.share != 1:
            assert 0 < figure.share < 1
            assert figure.share_source.startswith("assumed") or re.search(r"\b20\d\d\b", figure.share_source), figure


@pytest.mark.parametrize(
    ("name", "field", "whole"),
    [  # what the makers print for the whole machine, NVLink in both directions
        ("v100", "hbm_cap", 256e9),
        ("dgx-2", "hbm_cap", 512e9),
        ("dgx-2", "hbm_mem_bw", 14.4e12 / 1000),
        ("a100", "hbm_cap", 640e9),
        ("h100", "hbm_cap", 640e9),
        ("h200", "hbm_cap", 1128e9),
        ("h100", "hbm_mem_bw", 26.8e12 / 1000),
        ("h100", "intra_host_bw", 7.2e12 / 1000 / 2),
        ("a100", "intra_host_bw", 4.8e12 / 1000 / 2),
        ("gb200nvl72", "hbm_cap", 13.4e12),
        ("gb200nvl72", "hbm_mem_bw", 576e12 / 1000),
        ("gb200nvl72", "intra_host_bw", 130e12 / 1000 / 2),
        ("aws-p4d", "inter_host_bw", 400e9 / 8 / 1000),
        ("aws-p5", "inter_host_bw", 3200e9 / 8 / 1000),
        ("azure-nd-h100-v5", "inter_host_bw", 3.2e12 / 8 / 1000),
    ],
)
def test_the_ranks_of_a_host_add_up_to_what_is_printed_for_the_host(name: str, field: str, whole: float) -> None:
    peaks = {row["field"]: row["peak"] for row in preset_table(name).records()}
    assert peaks[field] * Topology.preset(name).world_size == pytest.approx(whole, rel=0.005)


@pytest.mark.parametrize("name", [machine.name for machine in MACHINES if not machine.one_host])
def test_the_table_holds_what_the_topology_was_given(name: str) -> None:
    topology = Topology.preset(name)
    for row in preset_table(name).records():
        assert getattr(topology, row["field"]) == row["value"]
        assert row["value"] <= row["peak"]


def test_a_number_is_ranks_in_hosts_of_the_usual_size() -> None:
    assert [(t.world_size, t.num_nodes) for t in map(Topology.preset, ("h100x64", "h100x4", "gb200nvl72x144"))] == [
        (64, 8),
        (4, 1),
        (144, 2),
    ]
    assert Topology.preset("P5.48xlargeX16") == Topology.preset("aws-p5", world_size=16)


@pytest.mark.parametrize("alias", ALIASES)
def test_another_spelling_is_the_same_machine(alias: str) -> None:
    assert Topology.preset(alias) == Topology.preset(ALIASES[alias])


def test_any_figure_can_be_given_instead() -> None:
    given = {"hbm_cap": 7, "intra_host_bw": 3.0, "launch_ms": 0.5, "reserve_fraction": 0.4, "local_world_size": 3}
    topology = Topology.preset("h100x12", **given)
    assert {name: getattr(topology, name) for name in given} == given
    assert topology.hbm_mem_bw == Topology.preset("h100").hbm_mem_bw


def test_a_laptops_memory_is_shared_by_its_ranks() -> None:
    two, eight = Topology.preset("cpu-laptopx2"), Topology.preset("cpu-laptopx8")
    assert two.compute_device == eight.compute_device == "cpu"
    assert 2 * two.ddr_cap == 8 * eight.ddr_cap == 16e9


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("h10x8", {}, "did you mean 'h100x8'"),
        ("gb200nvl", {}, "did you mean 'gb200nvl72'"),
        ("", {}, "topology preset '' does not exist"),
        ("h100x12", {}, "use h100x8 or h100x16"),
        ("h100x0", {}, "N at least 1"),
        ("h100x8", {"world_size": 16}, "has 8 ranks, but world_size is 16"),
        ("h100", {"world_size": 0}, "positive integer, got 0"),
        ("h100", {"hbm_capp": 1}, "did you mean 'hbm_cap'"),
        ("h100", {"world_size": "many"}, "world_size must be"),
        (8, {}, "name must be str, got 8"),
    ],
)
def test_a_name_that_says_nothing_is_refused_with_the_nearest(name, given, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Topology.preset(name, **given)


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
    with pytest.raises(ValueError, match="this machine"):
        preset_table("this")
