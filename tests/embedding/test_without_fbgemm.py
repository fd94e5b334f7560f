"""Where fbgemm and numba are not installed everything else works, and that is said once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib.abc, sys
import importlib.util

ABSENT = ("numba", "fbgemm_gpu") if BLOCK == "absent" else ("numba",)

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith(ABSENT) else found(name, *rest)
if BLOCK == "broken":
    import types
    broken = types.ModuleType("fbgemm_gpu")
    broken.__spec__ = importlib.util.spec_from_loader("fbgemm_gpu", None)
    sys.modules["fbgemm_gpu"] = broken  # its submodules cannot be imported

import torch
from recshard_lab.embedding import EmbeddingBagConfig, FusedEmbeddingBagCollection
from recshard_lab.embedding.kernels import available, kernel_named, kernel_names
from recshard_lab.sparse import KeyedJaggedTensor

print(available(), kernel_names())
print(kernel_named("fbgemm").unavailable())
print(kernel_named("numba").unavailable())
table = EmbeddingBagConfig(4, 4, "t", feature_names=["f"], init_fn=torch.nn.init.zeros_)
for _ in range(2):
    fused = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 1.0})
fused(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))).values().sum().backward()
print(fused.backend, fused.state_dict()["embedding_bags.t.weight"].sum().item())
try:
    FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 1.0}, backend="fbgemm")
except ValueError as error:
    print(error)
"""


def run(block: str) -> tuple[list[str], str]:
    program = f"BLOCK = {block!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_without_fbgemm_and_numba_the_native_kernel_does_it_all_and_says_so_once() -> None:
    out, err = run("absent")
    assert out[0] == "['native'] ['fbgemm', 'native', 'numba']"
    assert "fbgemm_gpu is not installed (pip install" in out[1]
    assert "numba is not installed (pip install" in out[2]
    assert out[3] == "native -4.0"
    assert out[4].startswith("no kernel can serve this lookup (fbgemm: fbgemm_gpu is not installed")
    assert err.count("kernel 'fbgemm' is not used") == 1
    assert err.count("kernel 'numba' is not used") == 1


def test_an_fbgemm_that_does_not_load_is_treated_as_absent_and_says_why() -> None:
    out, err = run("broken")
    assert out[0].startswith("['native']")
    assert "does not load beside torch" in out[1]
    assert out[3] == "native -4.0"
    assert err.count("kernel 'fbgemm' is not used") == 1
