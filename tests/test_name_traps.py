"""`profile` stays the standard module and `kernels` the Hub package, for everything that is run from the repo root."""

import os
import pstats
import subprocess
import sys

from autokernel.paths import repo_root


def python(*words, stdin=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([sys.executable, *words], cwd=repo_root(), input=stdin, capture_output=True, text=True,
                          timeout=200, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_standard_profile_and_cprofile():
    code = (
        "import profile, cProfile, pstats, sys\n"
        "assert profile.Profile and profile.run and profile.__name__ == 'profile'\n"
        "assert sys.modules['profile'] is profile and 'torch' not in sys.modules\n"
        "profile.runctx('sum(range(10))', {}, {}, '/dev/null'); cProfile.run('sum(range(9))'); print('fine')\n"
    )
    assert python("-c", code).endswith("fine\n")


def test_cprofile_as_a_command(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print(sum(range(100)))\n")
    out = tmp_path / "stats"
    assert python("-m", "cProfile", "-o", str(out), str(script)).startswith("4950")
    assert pstats.Stats(str(out)).total_calls > 0


def test_our_command_runs_as_a_module():
    assert "--class-name" in python("-m", "profile", "--help")


def test_torch_compile_transformers_and_spawned_children():
    code = (
        "import torch, multiprocessing as mp\n"
        "import profile\n"
        "def child(q):\n"
        "    import profile, cProfile\n"
        "    q.put(profile.Profile.__module__)\n"
        "if __name__ == '__main__':\n"
        "    f = torch.compile(lambda x: x * 2 + 1, backend='eager')\n"
        "    assert f(torch.ones(3)).tolist() == [3, 3, 3]\n"
        "    import torch._inductor.compile_fx\n"
        "    import importlib.util as u\n"
        "    if u.find_spec('transformers'):\n"
        "        from transformers import LlamaForCausalLM\n"
        "    context = mp.get_context('spawn')\n"
        "    q = context.Queue(); p = context.Process(target=child, args=(q,)); p.start()\n"
        "    print(q.get(timeout=60)); p.join()\n"
    )
    path = repo_root() / "workspace" / "trap_check.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import sys; sys.path.insert(0, {str(repo_root())!r})\n" + code)
    try:
        assert python(str(path)) == "profile\n"
    finally:
        path.unlink()


def test_kernels_is_no_package_of_ours():
    assert not list(repo_root().glob("kernels/**/__init__.py"))
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    origin = python("-c", code).strip()
    assert not origin.startswith(str(repo_root() / "kernels"))  # the Hub package (.venv too), or no file
