"""What public programs read, made up: text, tokens, graphs, pictures, and packages for logs.

Each function returns, or is, one that writes into the folder in which a program runs.
"""

from __future__ import annotations

import gzip
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

#: Writes what a program reads, into the folder in which it runs.
Data = Callable[[Path], None]


def words(*files: str, count: int = 60_000, kinds: int = 2_000) -> Data:
    """Text files of random words."""

    def write(folder: Path) -> None:
        draw = np.random.default_rng(0)
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            drawn = [f"w{one}" for one in draw.integers(0, kinds, count)]
            rows = [" ".join(drawn[at : at + 20]) for at in range(0, count, 20)]
            (folder / file).write_text("\n".join(rows) + "\n")

    return write


def characters(folder: Path) -> None:
    """Tokens and their description, as nanoGPT prepares them."""
    where = folder / "data" / "shakespeare_char"
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        draw.integers(0, 65, 1_000_000).astype(np.uint16).tofile(where / f"{split}.bin")
    (where / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65, "itos": {}, "stoi": {}}))


def cora(*files: str) -> Data:
    """A graph with the sizes of Cora."""

    def write(folder: Path) -> None:
        draw = np.random.default_rng(0)
        nodes, features, classes = 2708, 1433, 7
        given = draw.random((nodes, features)) < 0.013
        rows = [
            "\t".join(
                [str(at), *("1" if one else "0" for one in given[at]), f"class{at % classes}"]
            )
            for at in range(nodes)
        ]
        edges = [f"{a}\t{b}" for a, b in draw.integers(0, nodes, (5429, 2))]
        for where in files:
            path = folder / where
            path.mkdir(parents=True, exist_ok=True)
            (path / "cora.content").write_text("\n".join(rows) + "\n")
            (path / "cora.cites").write_text("\n".join(edges) + "\n")

    return write


def pictures(*folders: str, count: int = 400, side: int = 64, kinds: int = 4) -> Data:
    """Folders of JPEG files, as `ImageFolder` reads them."""

    def write(folder: Path) -> None:
        from PIL import Image

        draw = np.random.default_rng(0)
        for at in range(count):
            pixels = Image.fromarray(draw.integers(0, 255, (side, side, 3), np.uint8))
            for where in folders:
                path = folder / where / f"class{at % kinds}" / f"{at}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels.save(path)

    return write


def points(folder: Path) -> None:
    """Point clouds in ten classes, as ModelNet10 is stored."""
    draw = np.random.default_rng(0)
    where = folder / "data" / "modelnet40_normal_resampled"
    where.mkdir(parents=True, exist_ok=True)
    names = {"train": [f"kind{at % 10}_{at}" for at in range(240)], "test": ["kind0_0"] * 30}
    kinds = [f"kind{at}" for at in range(10)]
    (where / "modelnet10_shape_names.txt").write_text("\n".join(kinds) + "\n")
    for split, all_names in names.items():
        (where / f"modelnet10_{split}.txt").write_text("\n".join(all_names) + "\n")
    for name in names["train"]:
        path = where / name.split("_")[0]
        path.mkdir(exist_ok=True)
        np.savetxt(path / f"{name}.txt", draw.normal(size=(1024, 6)), fmt="%.5f", delimiter=",")


def stories(folder: Path) -> None:
    """Tokens of llama2.c's own stories."""
    draw = np.random.default_rng(0)
    where = folder / "data" / "TinyStories_all_data"
    where.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        drawn = draw.integers(1, 32_000, 400_000).astype(np.uint16)
        drawn[::200] = 1
        drawn.tofile(where / f"data{shard:02}.bin")
    (folder / "requests.py").touch()  # for downloads only


def sentence_pairs(folder: Path) -> None:
    """A corpus of two sentences a line, and BERT-pytorch's vocabulary of it."""
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(20_000):
        one, other = (" ".join(f"w{at}" for at in draw.integers(0, 5000, 12)) for _ in range(2))
        rows.append(f"{one}\t{other}")
    (folder / "corpus.txt").write_text("\n".join(rows) + "\n")
    command = "from bert_pytorch.dataset.vocab import build; build()"
    arguments = ["-c", "corpus.txt", "-o", "vocab.pkl"]
    subprocess.run([sys.executable, "-c", command, *arguments], cwd=folder, check=True)
    # The script that pip would install.
    (folder / "bert.py").write_text("from bert_pytorch.__main__ import train\n\ntrain()\n")


def tokens(folder: Path) -> None:
    """GPT-2 tokens as llm.c stores them, and the package of the tokenizer."""
    draw, count = np.random.default_rng(0), 1_000_000
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, count
    drawn = draw.integers(0, 50257, count).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(header.tobytes() + drawn.tobytes())
    (folder / "tiktoken.py").write_text("def get_encoding(name):\n    return None\n")


def bytes_of_text(folder: Path) -> None:
    """Somewhat more than the 90 MB of enwik8 that are read."""
    some = b"".join(b"w%d " % at for at in np.random.default_rng(0).integers(0, 999, 4000))
    (folder / "data").mkdir(exist_ok=True)
    with gzip.open(folder / "data" / "enwik8.gz", "wb", compresslevel=1) as file:
        file.write(some * (91_000_000 // len(some)))


def masked_pictures(folder: Path) -> None:
    """Pictures and their masks, and the package that logs what is learned from them."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for at in range(200):
        pixels = draw.integers(0, 255, (128, 192, 3), np.uint8)
        for where, drawn in (("imgs", pixels), ("masks", pixels[:, :, 0] // 128)):
            path = folder / "data" / where / f"{at}{'_mask' * (where == 'masks')}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(drawn).save(path)
    (folder / "wandb.py").write_text(_WANDB)


def carts_and_poles(folder: Path) -> None:
    """The packages that play CartPole and read the command line."""
    (folder / "gymnasium.py").write_text(_GYMNASIUM)
    (folder / "tyro.py").write_text("def cli(arguments):\n    return arguments()\n")


def folders(*names: str) -> Data:
    """Empty folders."""

    def write(folder: Path) -> None:
        for name in names:
            (folder / name).mkdir(parents=True)

    return write


_WANDB = """
class Image:
    def __init__(self, data):
        self.data = data


class Histogram(Image):
    pass


class Run:
    def __init__(self):
        self.config = {}

    def log(self, values):
        pass


def init(**settings):
    return Run()
"""

_GYMNASIUM = """
import math
import types

import numpy as np


class Space:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.draw = np.random.default_rng(0)

    def seed(self, seed):
        self.draw = np.random.default_rng(seed)


class Box(Space):
    pass


class Discrete(Space):
    def __init__(self, n):
        super().__init__((), np.int64)
        self.n = n

    def sample(self):
        return self.draw.integers(self.n)


class MultiDiscrete(Space):
    pass


class MultiBinary(Space):
    pass


class Dict(Space):
    pass


class CartPole:
    observation_space, action_space = Box((4,), np.float32), Discrete(2)
    draw = np.random.default_rng(0)

    def reset(self, seed=None):
        if seed is not None:
            self.draw = np.random.default_rng(seed)
        self.state, self.steps = self.draw.uniform(-0.05, 0.05, 4), 0
        return self.state.astype(np.float32)

    def step(self, action):
        x, v, angle, w = self.state
        force = 10.0 if action else -10.0
        pushed = (force + 0.05 * w**2 * math.sin(angle)) / 1.1
        turned = 9.8 * math.sin(angle) - math.cos(angle) * pushed
        turned /= 0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        moved = pushed - 0.05 * turned * math.cos(angle) / 1.1
        self.state = self.state + 0.02 * np.array([v, moved, w, turned])
        self.steps += 1
        return self.state.astype(np.float32), abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2


class SyncVectorEnv:
    def __init__(self, makers):
        self.envs = [make() for make in makers]
        self.num_envs = len(makers)
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def reset(self, seed=None):
        return np.stack([env.reset(seed + at) for at, env in enumerate(self.envs)]), {}

    def step(self, actions):
        rows, over, ends = [], [], [None] * self.num_envs
        for at, (env, action) in enumerate(zip(self.envs, actions)):
            row, fell = env.step(action)
            if fell:
                ends[at] = {"episode": {"r": np.array([env.steps]), "l": np.array([env.steps])}}
                row = env.reset()
            rows.append(row)
            over.append(fell)
        infos = {"final_info": ends} if any(over) else {}
        return np.stack(rows), np.ones(len(rows)), np.array(over), np.zeros(len(rows), bool), infos

    def close(self):
        pass


def make(name):
    return CartPole()


spaces = types.SimpleNamespace(**{
    one.__name__: one for one in (Space, Box, Discrete, MultiDiscrete, MultiBinary, Dict)
})
wrappers = types.SimpleNamespace(RecordEpisodeStatistics=lambda env: env)
vector = types.SimpleNamespace(SyncVectorEnv=SyncVectorEnv)
"""
