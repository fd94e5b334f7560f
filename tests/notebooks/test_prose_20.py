"""The prose of notebook 20 is what its cells print."""

import re

from recshard_lab.compat import coverage, differences
from tests.notebooks.claims import stored

TORCHREC = stored("20")


def test_the_classes_are_this_librarys_and_the_served_share_is_computed() -> None:
    assert "It refuses where TorchRec is installed." in TORCHREC.prose("## 1. The import")
    assert "the same class: True" in TORCHREC.output_of("print(KeyedJaggedTensor)")
    served = sum(len(module.served) for module in coverage())
    known = served + sum(len(module.missing) for module in coverage())
    cell = TORCHREC.cell("lab.guess(guess_served")
    assert f"{served} of {known} names" in cell.output
    assert cell.number(after="It is") == round(100 * served / known)


def test_the_script_ran_on_two_ranks_without_a_line_for_this_library() -> None:
    assert "It has no line for this library." in TORCHREC.prose("## 2. A script")
    assert TORCHREC.output_of("command = [").startswith("2 ranks, 40 steps, recshard_lab.distributed")
    written = [c.source for c in TORCHREC.notebook.cells if c.source.startswith("%%writefile")]
    assert len(written) == 3
    assert not any("recshard" in source for source in written)


def test_the_report_lists_the_names_of_the_script_and_plans_its_table() -> None:
    cell = TORCHREC.cell("compat.read_script(")
    counts = [int(number) for number in re.findall(r"(\d+) (?:are|differ)", cell.output)]
    assert cell.number(after="It is") == sum(counts) > 5
    assert "are served" in cell.output
    plan = TORCHREC.output_of("report.plan(4)")
    assert "film" in plan
    assert "python -m recshard_lab.compat --translate train.py" in plan


def test_the_kernel_is_dense_and_placements_are_gpus() -> None:
    assert "Otherwise its gradient is in `.grad`" in TORCHREC.prose("TorchRec fuses the optimizer")
    cell = TORCHREC.cell("lab.guess(guess_kernel")
    assert "It is dense." in cell.output
    assert "['rank:0/cuda:0', 'rank:1/cuda:1']" in cell.output


def test_the_table_has_every_difference() -> None:
    shown = TORCHREC.output_of("compat.differences()")
    for difference in differences().rows:
        assert difference.subject in shown
        assert difference.torchrec in shown


def test_answers_of_the_teachers_page() -> None:
    assert TORCHREC.output_of("mine_a").strip().endswith("by_parts, in the cell above")
    assert TORCHREC.output_of("mine_b").strip().endswith("One solution: Adam")
    assert TORCHREC.cell("mine_c").number("ranks") == 16
