"""Any model loads, with inputs found from the model itself, or one clear error."""

import argparse
import json
import textwrap

import pytest
import torch
import torch.nn as nn

from autokernel import models
from autokernel.models import ModelError
from autokernel.paths import repo_root

torch.set_num_threads(1)


def options(*words):
    parser = argparse.ArgumentParser()
    models.add_options(parser)
    return parser.parse_args([str(w) for w in words])


def load(*words):
    return models.load(options(*words, "--device", "cpu"))


@pytest.fixture
def source(tmp_path):
    def write(text, name="model.py"):
        path = tmp_path / name
        imports = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
        path.write_text(imports + textwrap.dedent(text))
        return path

    return write


SHIPPED = [("gpt2.py", "GPT2", 50257, 124.4), ("llama_7b.py", "LlamaModel", 32000, 134.1),
           ("bert_base.py", "BertModel", 30522, 109.5)]  # fmt: skip


@pytest.mark.parametrize(("file", "name", "vocabulary", "millions"), SHIPPED)
def test_shipped_model_gives_finite_halves(file, name, vocabulary, millions):
    path = repo_root() / "models" / file
    loaded = load("--model", path, "--class-name", name, "--input-shape", "1,8", "--dtype", "fp16")
    ids = loaded.args[0]
    assert ids.shape == (1, 8) and ids.dtype == torch.int64 and int(ids.max()) < vocabulary
    assert abs(sum(p.numel() for p in loaded.model.parameters()) / 1e6 - millions) < 0.1
    out = loaded()
    for tensor in out if isinstance(out, tuple) else (out,):
        assert tensor.dtype == torch.float16 and tensor.isfinite().all()
    assert not loaded.model.training


def test_llama_7b_has_the_published_size():
    with torch.device("meta"):
        model = models.load_file(repo_root() / "models" / "llama_7b.py").LlamaModel7B()
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616


def test_template_uses_its_hooks():
    path = repo_root() / "models" / "custom.py"
    loaded = load("--model", path)
    assert loaded.args[0].shape == (8, 256, 512) and loaded.name == "CustomModel"
    assert load("--model", path, "--input-shape", "2,3,512").args[0].shape == (2, 3, 512)


def test_names_say_nothing(source):
    path = source("""
        class OptimizedFilmGPTLM(nn.Module):  # an image model
            def __init__(self):
                super().__init__()
                self.net = nn.Conv2d(5, 4, 3)
            def forward(self, x):
                return self.net(x)
        class ResNetVision(nn.Module):  # a token model, whose embedding hides and whose positions come first
            def __init__(self):
                super().__init__()
                self.deep = nn.ModuleDict({"position": nn.Embedding(9, 8), "word": nn.Embedding(11, 8)})
            def forward(self, ids):
                return self.deep["position"](torch.arange(ids.shape[1])) + self.deep["word"](ids)
        class Functional(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Parameter(torch.randn(13, 4))
            def forward(self, tokens):
                return F.embedding(tokens, self.table)
        """)
    assert load("--model", path, "--class-name", "OptimizedFilmGPTLM").args[0].shape == (1, 5, 224, 224)
    tokens = load("--model", path, "--class-name", "ResNetVision").args[0]  # as long as its table of positions
    assert tokens.shape == (1, 9) and tokens.dtype == torch.int64 and int(tokens.max()) in range(9, 11)
    drawn = load("--model", path, "--class-name", "Functional", "--input-shape", "4,99").args[0]
    assert int(drawn.max()) == 12


def test_positions_beyond_the_table_are_an_error_not_a_device_assert(source):
    path = source("""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.word, self.position = nn.Embedding(11, 8), nn.Embedding(9, 8)
            def forward(self, ids):
                return self.word(ids) + self.position(torch.arange(ids.shape[1]))
        """)
    with pytest.raises(ModelError, match="beyond an embedding of 9 rows"):
        load("--model", path, "--input-shape", "1,10")


def test_a_shape_that_does_not_fit_is_named(source):
    path = source("""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.word, self.position = nn.Embedding(11, 8), nn.Parameter(torch.zeros(9, 8))
            def forward(self, ids):
                return self.word(ids) + self.position[: ids.shape[1]]
        """)
    says = r"--input-shape 1,10 does not fit Net \(token ids .*size of tensor a \(10\) must match.*give another"
    with pytest.raises(ModelError, match=says):
        load("--model", path, "--input-shape", "1,10")


@pytest.mark.parametrize(("body", "says"), [
    ("return None", "returned None, a NoneType"),
    ("return 'ids'", "returned 'ids', a str"),
    ("return torch.nn.ReLU()", "a ReLU"),
    ("raise KeyError('the cause')", "KeyError: 'the cause'.*model.py line"),
    ("raise SystemExit('the cause')", "SystemExit: the cause"),
])  # fmt: skip
@pytest.mark.parametrize("option", [True, False])
def test_inputs_that_are_none(source, body, says, option):
    """By --inputs or example_inputs: what it was, where, and what is allowed."""
    name = "given" if option else "example_inputs"
    text = "class A(nn.Linear):\n    def __init__(self): super().__init__(2, 2)\n"
    path = source(text + f"def {name}():\n    {body}\n")
    with pytest.raises(ModelError, match=f"{name}: .*{says}.*must return a tensor, a tuple or list .* or a dict"):
        load("--model", path, "--class-name", "A", *(["--inputs", f"{path}:given"] if option else []))


def test_frozen_dataclass_config_and_sibling_file(source):
    config = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Settings:\n    dim: int = 6\n"
    source("", "my_settings.py").write_text("from __future__ import annotations\n" + config)
    text = (
        "from __future__ import annotations\nimport torch.nn as nn\nfrom dataclasses import dataclass, field\n"
        "from my_settings import Settings\n"
        "@dataclass(frozen=True)\nclass Config:\n    inner: Settings = field(default_factory=Settings)\n"
        "class Net(nn.Module):\n    def __init__(self, config: Config):\n        super().__init__()\n"
        "        self.net = nn.Linear(config.inner.dim, 2)\n    def forward(self, x):\n        return self.net(x)\n"
    )
    path = source("")
    path.write_text(text)
    assert load("--model", path).args[0].shape == (8, 6)


def test_package_relative_imports(tmp_path):
    package = tmp_path / "mypkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("import torch.nn as nn\nclass Part(nn.Linear):\n    pass\n")
    (package / "net.py").write_text("from .parts import Part\ndef build():\n    return Part(3, 2)\n")
    assert load("--model", package / "net.py", "--class-name", "build").args[0].shape == (8, 3)


def test_several_inputs(source, tmp_path):
    path = source("""
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(4, 4)
            def forward(self, x, *, scale):
                return self.net(x) * scale
        class KeywordOnly(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(4, 4)
            def forward(self, *, features):
                return self.net(features)
        class Three(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(4, 4)
            def forward(self, x, y):
                return self.net(x) + y
        def inputs():
            return {"x": torch.ones(2, 4), "scale": torch.ones(1, dtype=torch.float64)}
        """)
    loaded = load("--model", path, "--class-name", "Two", "--inputs", f"{path}:inputs", "--dtype", "fp16")
    assert loaded.kwargs["scale"].dtype == torch.float16 and loaded().dtype == torch.float16
    words = ("--class-name", "KeywordOnly", "--inputs", f"{path}:inputs", "--input-shape", "3,4")
    assert "--inputs" in " ".join(load("--model", path, *words).notes)
    assert load("--model", path, "--class-name", "KeywordOnly").kwargs["features"].shape == (8, 4)
    with pytest.raises(ModelError, match=r"forward needs 2 arguments \(x, y\).*--inputs"):
        load("--model", path, "--class-name", "Three")


def test_complex_buffers_keep_their_imaginary_part(source):
    path = source("""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(4, 4)
                self.register_buffer("table", torch.tensor([1j, 2.0]))
            def forward(self, x):
                return self.net(x)
        """)
    loaded = load("--model", path, "--dtype", "bfloat16")
    assert loaded.model.table[0] == 1j and loaded.dtype == torch.bfloat16


def test_a_model_that_stays_in_train_mode_is_said_to(source):
    path = source("""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
            def train(self, mode=True):
                return super().train(True)
            def forward(self, x):
                return self.net(x)
        """)
    assert "stay in train mode" in load("--model", path).notes[0]


def test_out_of_memory_suggests_the_shape_that_fits(source):
    path = source("""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.word = nn.Embedding(11, 8)
            def forward(self, ids):
                if ids.numel() > 100:
                    raise torch.OutOfMemoryError("no memory")
                return self.word(ids)
        """)
    with pytest.raises(ModelError, match="--input-shape 1,64"):
        load("--model", path, "--input-shape", "4,128")
    with pytest.raises(ModelError, match="even at"):
        load("--model", source("""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.word = nn.Embedding(11, 8)
                def forward(self, ids):
                    raise torch.OutOfMemoryError("no memory")
            """, "never.py"), "--input-shape", "4,128")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("class Net(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n", [], "model_kwargs"),
        ("class A(nn.Module): pass\nclass B(nn.Module): pass\n", [], "--class-name; it defines A, B"),
        ("class A(nn.Module): pass\n", ["--class-name", "Z"], "no class or function 'Z'; it defines A"),
        ("import nowhere_to_be_found\n", [], "ModuleNotFoundError.*nowhere"),
        ("def build():\n    return 3\n", ["--class-name", "build"], "expected a torch.nn.Module"),
        (
            "class A(nn.Module):\n    def forward(self, x):\n        raise KeyError('the cause')\n",
            ["--input-shape", "2,2"], "the cause.*model.py line",
        ),
    ],
)  # fmt: skip
def test_errors_say_the_cause(source, text, words, message):
    path = source("")
    path.write_text("import torch\nimport torch.nn as nn\n" + text)
    with pytest.raises(ModelError, match=message):
        load("--model", path, *words)


def test_usage_errors(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        load("--model", tmp_path / "none.py")
    with pytest.raises(ModelError, match="--model FILE or --module"):
        load()
    for name in ("cuda:99", "mps", "gpu"):
        with pytest.raises(ModelError, match=f"--device {name}: no such device here.*allowed: .*cpu"):
            models.load(options("--model", repo_root() / "models" / "custom.py", "--device", name))
    with pytest.raises(ModelError, match="--module no_such_package"):
        load("--module", "no_such_package", "--class-name", "X")


def test_options_survive_json():
    given = options("--model", "models/gpt2.py", "--class-name", "GPT2", "--input-shape", "1,8", "--dtype", "fp16")
    again = models.from_json(json.loads(json.dumps(models.as_json(given))))
    assert again.model == given.model.resolve() and again.input_shape == (1, 8) and again.dtype == "fp16"


def test_transformers_from_config(tmp_path):
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, given in (("AutoModelForCausalLM", tmp_path), ("LlamaModel", tmp_path / "config.json")):
        loaded = load("--module", "transformers", "--class-name", name, "--config", given, "--dtype", "bf16")
        assert loaded.kwargs["input_ids"].shape == (1, 16) and loaded.kwargs["use_cache"] is False
        assert loaded.name == name.replace("AutoModel", "Llama")
        assert loaded.dtype == torch.bfloat16
        inverse = next(b for n, b in loaded.model.named_buffers() if n.endswith("inv_freq"))
        assert inverse.dtype == torch.float32  # in half precision far positions would be wrong
    with pytest.raises(ModelError, match="--pretrained ID_OR_FOLDER, or --config"):
        load("--module", "transformers", "--class-name", "AutoModelForCausalLM")
    with pytest.raises(ModelError, match="AutoModelForCausalLM: .*Error"):
        load("--module", "transformers", "--class-name", "AutoModelForCausalLM", "--pretrained", tmp_path / "nothing")


def test_module_path_is_a_plain_function():
    assert isinstance(load("--module", "torch.nn", "--class-name", "Flatten", "--input-shape", "2,3").model, nn.Flatten)
