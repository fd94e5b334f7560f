"""The prose of notebooks 15 and 16 is what their cells print."""

from tests.notebooks.claims import stored

PIPELINE, OUT = stored("15"), stored("16")


def test_three_of_four_pipelines_have_the_losses_of_the_plain_loop() -> None:
    told = PIPELINE.cell("sum(one == losses")
    assert told.number(after="It is") == 3
    assert [line.split()[0] for line in told.output.splitlines() if "other losses" in line] == ["semi_sync"]
    assert "so it trains another model" in PIPELINE.prose("A pipeline that only moves messages")


def test_scores_of_the_pipeline_equal_direct_calls() -> None:
    assert "True" in PIPELINE.output_of("EvalPipelineSparseDist")
    assert "Its outputs equal those of direct calls." in PIPELINE.prose("does the same for scoring")


def test_ids_are_hidden_behind_computing_and_conclusions_are_computed() -> None:
    assert "of input_dist ran behind computing" in PIPELINE.cell('name="SparseDist"').output
    verdicts = PIPELINE.output_of("clear = max(times)").splitlines()
    assert len(verdicts) == 3
    assert all(line.endswith(("the plain loop", "no clear difference", "faster", "slower")) for line in verdicts)


def test_one_sum_however_the_script_is_started() -> None:
    cells = ('terminal(sys.executable, "films.py")', '_ = ranks.exec(Path("films.py")')
    lines = [line for words in cells for line in OUT.output_of(words).splitlines()]
    sums = {line.rpartition(": ")[2] for line in lines if ": -" in line or ": 0" in line}
    assert len(sums) == 1
    assert "changes nothing that is computed" in OUT.prose("The script contains no number of ranks")


def test_a_wrong_key_is_named_with_its_line() -> None:
    assert OUT.output_of("except ValueError as error:\n    print(str(error)").startswith(
        "run.yaml, line 4, field 'epoch'"
    )
    assert "A wrong key is an error with its line." in OUT.prose("You need no script")


def test_it_resumes_at_a_multiple_of_20_with_the_weights_of_a_run_that_was_never_killed() -> None:
    killed = OUT.cell("process.kill()").number(after="step")
    resumed = OUT.cell('after[0]["step"] - 20').number(after="It is")
    assert killed >= 60
    assert resumed in (killed, killed - 20)
    assert resumed % 20 == 0
    assert OUT.cell("apart = max(").number(after="largest difference of a weight") == 0
    assert "bit for bit" in OUT.output_of("apart = max(")


def test_optimizer_states_are_in_the_file_and_missing_ones_raise() -> None:
    loaded = OUT.cell("rs.load_checkpoint(path, model)")
    assert all(row[1] > 0 for row in (loaded.row("checkpoint:"), loaded.row("never_killed:")))
    assert "does not match the optimizer" in OUT.output_of('"no_optimizer", model, adam')


def test_plain_torch_reads_the_weights_and_two_matching_keys_raise() -> None:
    assert "False" in OUT.output_of('terminal(sys.executable, "plain.py")')
    assert "2 of them named after it" in OUT.output_of('{"films": "two.pt"}')
