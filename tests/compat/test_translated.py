"""A tutorial's text for a machine without a GPU for each rank."""

import pytest

from recshard_lab.compat.torchrec import translated

MANY = 10**6  # more ranks than any machine has GPUs


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ('device = "cuda"', 'device = "cpu"'),
        ("torch.device(f'cuda:{rank}')", "torch.device('cpu')"),
        ("""f"cuda:{os.environ['LOCAL_RANK']}" + "x" """, '"cpu" + "x" '),
        ('dist.init_process_group("nccl")', 'dist.init_process_group("gloo")'),
        ('if backend == "nccl":', 'if backend == "gloo":'),
        ("ids.cuda()", "ids.cpu()"),
        ("ids.cuda(rank).long()", "ids.cpu().long()"),
        ("    torch.cuda.set_device(device)", "    None"),
        ("!pip install torchrec", "# !pip install torchrec"),
        ("  %time step()", "  # %time step()"),
        ("sys.path = ['', 'x']", "# sys.path = ['', 'x']"),
        ("left = a % b", "left = a % b"),
        ("left = (a\n    % b)", "left = (a\n    % b)"),
        ("print('cudagraphs')", "print('cudagraphs')"),
    ],
)
def test_what_a_text_says_about_the_machine_is_put_right(given: str, meant: str) -> None:
    assert translated(given, world_size=MANY) == meant


def test_translated_text_still_parses_where_the_gpu_was_set_under_a_condition() -> None:
    source = 'if backend == "nccl":\n    torch.cuda.set_device(rank)\nelse:\n    pass\n'
    compile(translated(source, world_size=MANY), "cell", "exec")


def test_lines_keep_their_numbers() -> None:
    source = "!nvidia-smi\n\nx = 1\n"
    assert translated(source).count("\n") == source.count("\n")
