"""Public training programs: where each is, what it needs, and where `hr.speed_up` goes.

`LINE` are the programs that get one line. `UNCHANGED` are those that run as they are, under
`headrace run`. A checkout of each repository is expected, at the commit given, in a folder named
`OWNER+NAME`. Data are made up by the functions here, since only the loop is of interest.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Writes what a program reads, into the folder in which it runs.
Data = Callable[[Path], None]


@dataclass(frozen=True)
class Program:
    """A public program. `after` is the text of the line, in `file`, behind which `line` goes; the
    file is the script itself unless another is named: then the repository is on Python's path, as
    its packages would be if they were installed. `small` are arguments added on a CPU."""

    name: str
    repository: str
    commit: str
    script: str
    arguments: str = ""
    small: str = ""
    parts: str = "model, optimizer"
    after: str = ""
    file: str | None = None
    data: Data | None = None
    #: Count backwards as steps, where the optimizer's `step` is not what the loop calls.
    by_backward: bool = False
    #: Text of the script that is replaced on a CPU, where it trains too large a model.
    smaller: tuple[tuple[str, str], ...] = ()

    @property
    def line(self) -> str:
        return f"import headrace as hr; hr.speed_up({self.parts})"

    @property
    def checkout(self) -> str:
        return self.repository.replace("/", "+")

    @property
    def folder(self) -> str:
        """The folder in which the program runs."""
        return str(Path(self.script).parent)

    def with_line(self, text: str) -> str:
        """The file, with the line added at the same indentation."""
        lines = text.splitlines()
        found = [at for at, one in enumerate(lines) if self.after in one]
        if len(found) != 1:
            raise SystemExit(
                f"{self.name}: {len(found)} lines have {self.after!r}; expected one, "
                f"at {self.commit}"
            )
        end = found[0]
        if not self.after.endswith("\n"):
            depth = 0
            for end in range(found[0], len(lines)):
                depth += sum(lines[end].count(one) for one in "([{")
                depth -= sum(lines[end].count(one) for one in ")]}")
                if depth <= 0:
                    break
        margin = lines[found[0]][: len(lines[found[0]]) - len(lines[found[0]].lstrip())]
        return "\n".join([*lines[: end + 1], margin + self.line, *lines[end + 1 :], ""])


# --- made-up data -----------------------------------------------------------------------------


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


def pictures(*folders: str, count: int = 400, side: int = 64) -> Data:
    """Folders of JPEG files, as `ImageFolder` reads them."""

    def write(folder: Path) -> None:
        from PIL import Image

        draw = np.random.default_rng(0)
        for at in range(count):
            pixels = Image.fromarray(draw.integers(0, 255, (side, side, 3), np.uint8))
            for where in folders:
                path = folder / where / f"class{at % 4}" / f"{at}.jpg"
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


# --- the programs -----------------------------------------------------------------------------

_EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
_GANS = ("eriklindernoren/PyTorch-GAN", "36d3c77e5ff20ebe0aeefd322326a134a279b93e")
_YUNJEY = ("yunjey/pytorch-tutorial", "0500d3df5a2a8080ccfccbc00aca0eacc21818db")

LINE = (
    Program(
        "mnist", *_EXAMPLES, "mnist/main.py",
        small="--batch-size 4",
        after="optimizer = optim.Adadelta(",
    ),
    Program(
        "imagenet", *_EXAMPLES, "imagenet/main.py", "--dummy -b 32 -j 8 -p 1000 --gpu 0",
        small="-b 2 -j 1",
        after="optimizer = torch.optim.SGD(",
    ),
    Program(
        "dcgan", *_EXAMPLES, "dcgan/main.py", "--dataset fake --accel --workers 12",
        small="--batchSize 2 --ngf 8 --ndf 8 --workers 1",
        parts="netD, netG, optimizerD, optimizerG", after="optimizerG = optim.Adam(",
    ),
    Program(
        "vae", *_EXAMPLES, "vae/main.py",
        small="--batch-size 4", after="optimizer = optim.Adam(",
    ),
    Program(
        "lstm language model", *_EXAMPLES, "word_language_model/main.py",
        "--accel --use-optimizer --lr 0.001",
        small="--emsize 16 --nhid 16 --batch_size 4 --bptt 5",
        after="optimizer = torch.optim.AdamW(",
        data=words(*(f"data/wikitext-2/{one}.txt" for one in ("train", "valid", "test"))),
    ),
    Program(
        "transformer language model", *_EXAMPLES, "word_language_model/main.py",
        "--accel --use-optimizer --lr 0.001 --model Transformer --nlayers 4",
        small="--emsize 16 --nhid 16 --batch_size 4 --bptt 5 --nlayers 2",
        after="optimizer = torch.optim.AdamW(",
        data=words(*(f"data/wikitext-2/{one}.txt" for one in ("train", "valid", "test"))),
    ),
    Program(
        "mnist_rnn", *_EXAMPLES, "mnist_rnn/main.py", "--accel",
        small="--batch-size 4", after="optimizer = optim.Adadelta(",
    ),
    Program(
        "siamese_network", *_EXAMPLES, "siamese_network/main.py",
        small="--batch-size 2", after="optimizer = optim.Adadelta(",
    ),
    Program(
        "nanoGPT", "karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "train.py",
        "config/train_shakespeare_char.py --compile=False --eval_iters=2",
        small="--n_layer=2 --n_embd=12 --n_head=2 --batch_size=2 --block_size=8",
        after="optimizer = model.configure_optimizers(",
        data=characters,
    ),
    Program(
        "minGPT adder", "karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
        "projects/adder/adder.py",
        small="--trainer.batch_size=4 --trainer.num_workers=1",
        file="mingpt/trainer.py", parts="model, self.optimizer",
        after="self.optimizer = model.configure_optimizers(config)",
    ),
    Program(
        "makemore", "karpathy/makemore", "988aa59e4d8fefa526d06f3b453ad116258398d4", "makemore.py",
        "--device cuda",
        small="-b 2 --n-embd 8 --n-layer 2 -n 1",
        after="optimizer = torch.optim.AdamW(",
    ),
    Program(
        "ng-video-lecture", "karpathy/ng-video-lecture",
        "52201428ed7b46804849dea0b3ccf0de9df1a5c3", "gpt.py",
        smaller=(("batch_size = 64", "batch_size = 2"), ("block_size = 256", "block_size = 8"),
                 ("eval_iters = 200", "eval_iters = 1"), ("n_embd = 384", "n_embd = 12"),
                 ("n_layer = 6", "n_layer = 2")),
        after="optimizer = torch.optim.AdamW(",
    ),
    Program(
        "wgan_gp", *_GANS, "implementations/wgan_gp/wgan_gp.py",
        small="--batch_size 2 --img_size 4",
        parts="generator, discriminator, optimizer_G, optimizer_D",
        after="optimizer_D = torch.optim.Adam(",
    ),
    Program(
        "acgan", *_GANS, "implementations/acgan/acgan.py",
        small="--batch_size 2 --img_size 16",
        parts="generator, discriminator, optimizer_G, optimizer_D",
        after="optimizer_D = torch.optim.Adam(",
    ),
    Program(
        "infogan", *_GANS, "implementations/infogan/infogan.py",
        small="--batch_size 2 --img_size 16",
        parts="generator, discriminator, optimizer_G, optimizer_D, optimizer_info",
        after="optimizer_info = torch.optim.Adam(",
    ),
    Program(
        "pytorch-cifar", "kuangliu/pytorch-cifar", "49b7aa97b0c12fe0d4054e670403a16b6b834ddd",
        "main.py", parts="net, optimizer",
        smaller=(("batch_size=128", "batch_size=2"), ("SimpleDLA()", "LeNet()")),
        after="optimizer = optim.SGD(",
    ),
    Program(
        "residual network tutorial", *_YUNJEY,
        "tutorials/02-intermediate/deep_residual_network/main.py",
        smaller=(("batch_size = 100", "batch_size = 2"),),
        after="optimizer = torch.optim.Adam(",
    ),
    Program(
        "language model tutorial", *_YUNJEY, "tutorials/02-intermediate/language_model/main.py",
        smaller=(("hidden_size = 1024", "hidden_size = 16"), ("seq_length = 30", "seq_length = 4")),
        after="optimizer = torch.optim.Adam(", data=words("data/train.txt"),
    ),
    Program(
        "sam", "davda54/sam", "3c3afdbd71cff2462ec91c734b3d1170bd0f3707", "example/train.py",
        small="--batch_size 2 --width_factor 1 --threads 1",
        after="optimizer = SAM(", by_backward=True,
    ),
    Program(
        "timm", "huggingface/pytorch-image-models",
        "aa4b5850c1543fa488abf260f18390eda46cf85d", "train.py",
        "--data-dir pictures --train-split train --val-split train --model vit_small_patch16_224 "
        "-b 32 --num-classes 4 --opt adamw --lr 1e-4 -j 12 --amp --amp-dtype bfloat16",
        small="--model test_vit -b 2 -j 1",
        after="optimizer = create_optimizer_v2(", data=pictures("pictures/train", count=2000),
    ),
)  # fmt: skip

UNCHANGED = (
    Program(
        "pygcn", "tkipf/pygcn", "1600b5b748b3976413d1e307540ccc62605b4d6d", "pygcn/train.py",
        "--epochs 2000", file="pygcn/train.py", data=cora("../data/cora"),
    ),
    Program(
        "pyGAT", "Diego999/pyGAT", "3664f2dc90cbf971564c0bf186dc794f12446d0c", "train.py",
        data=cora("data/cora"),
    ),
    Program(
        "Conditional_Diffusion_MNIST", "TeaPearce/Conditional_Diffusion_MNIST",
        "657b49854bbf844caa5580177243ae607c79339f", "script.py",
        smaller=(("batch_size = 256", "batch_size = 2"), ("n_feat = 128", "n_feat = 8")),
    ),
    Program(
        "minDiffusion", "cloneofsimo/minDiffusion", "00a3c8066d25a34d3d472ef6c87c7b6b238ea444",
        "superminddpm.py",
        smaller=(("batch_size=128", "batch_size=2"), ("num_workers=20", "num_workers=1")),
    ),
    Program(
        "pytorch-cifar100", "weiaicunzai/pytorch-cifar100",
        "11d8418f415b261e4ae3cb1ffe20d06ec95b98e4", "train.py", "-net resnet18 -gpu",
        small="-net squeezenet -b 2",
    ),
    Program(
        "SimCLR", "sthalles/SimCLR", "1848fc934ad844ae630e6c452300433fe99acfd9", "run.py",
        "-dataset-name cifar10 -b 64 --fp16-precision",
        small="-b 4 -j 1",
    ),
    Program(
        "resnet_cifar10", "akamaster/pytorch_resnet_cifar10",
        "d5489e8995e81e91ce6b1d69dcc98ad579b0b153", "trainer.py", small="-b 2 -j 1 -a resnet20",
    ),
    Program(
        "llama2.c", "karpathy/llama2.c", "350e04fe35433e6d2941dce5a1f53308f87058eb", "train.py",
        "--compile=False --eval_iters=2 --batch_size=32 --gradient_accumulation_steps=2",
        small="--dim=8 --n_layers=2 --n_heads=2 --n_kv_heads=2 --batch_size=2 --max_seq_len=8",
        data=stories,
    ),
    Program(
        "PointNet", "yanx27/Pointnet_Pointnet2_pytorch",
        "eb64fe0b4c24055559cea26299cb485dcb43d8dd", "train_classification.py",
        "--model pointnet_cls --num_category 10 --log_dir pointnet",
        small="--batch_size 2 --num_point 16", data=points,
    ),
    Program(
        "BERT-pytorch", "codertimo/BERT-pytorch", "d10dc4f9d5a6f2ca74380f62039526eb7277c671",
        "bert.py", "-c corpus.txt -v vocab.pkl -o out -w 2",
        small="-hs 8 -l 2 -a 2 -b 2 -w 0", data=sentence_pairs,
    ),
)  # fmt: skip
