"""Public training programs: where each is, what it needs, and where `hr.speed_up` goes.

`LINE` are the programs that get one line. `UNCHANGED` are those that run as they are, under
`headrace run`. A checkout of each repository is expected, at the commit given, in a folder named
`OWNER+NAME`. Data are made up, since only the loop is of interest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from public_data import (
    Data,
    bytes_of_text,
    carts_and_poles,
    characters,
    cora,
    folders,
    masked_pictures,
    pictures,
    points,
    sentence_pairs,
    stories,
    tokens,
    words,
)


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
    Program(
        "airbench", "KellerJordan/cifar10-airbench", "f1c599c4af24aca803e3e65a6a7e52a502e09d0e",
        "legacy/airbench94.py", data=folders("cifar10"),
        smaller=(("'batch_size': 1024", "'batch_size': 16"), ("'block1': 64", "'block1': 16"),
                 ("'block2': 256", "'block2': 16"), ("'block3': 256", "'block3': 16")),
    ),
    Program(
        "llm.c", "karpathy/llm.c", "f1e2ace651495b74ae22d45d1723443fd00ecd3a", "train_gpt2.py",
        "--input_bin tokens.bin --model d12 --batch_size 8 --sequence_length 256 "
        "--total_batch_size 4096 --num_iterations 400 --write_tensors 0 --dtype bfloat16 "
        "--overfit_single_batch 0",
        small="--batch_size 1 --sequence_length 8 --total_batch_size 16 --num_iterations 14",
        smaller=(("vocab_size=50257, n_layer=12, n_head=12, n_embd=768",
                  "vocab_size=50257, n_layer=2, n_head=2, n_embd=12"),),
        data=tokens,
    ),
    Program(
        "torchvision references", "pytorch/vision", "e6f04004f0e0f759b44329d9ee6751a55abf0f83",
        "references/classification/train.py",
        "--data-path pictures --model resnet18 -b 64 -j 12 --amp --model-ema --opt adamw --lr 1e-3 "
        "--mixup-alpha 0.2 --label-smoothing 0.1 --clip-grad-norm 1 --epochs 20",
        small="-b 16 -j 1 --model squeezenet1_1 --train-crop-size 32 --val-resize-size 32 "
        "--val-crop-size 32 --epochs 2 --print-freq 1000",
        data=pictures("pictures/train", "pictures/val", count=512, kinds=8),
    ),
    Program(
        "x-transformers", "lucidrains/x-transformers", "80bd4d946cf6e7253620df423ceb63f6f9534692",
        "examples/enwik8_simple/train.py", file="x_transformers/__init__.py",
        smaller=(("GENERATE_LENGTH = 1024", "GENERATE_LENGTH = 4"),
                 ("SEQ_LEN = 1024", "SEQ_LEN = 8"),
                 ("dim = 512, depth = 6, heads = 8", "dim = 16, depth = 2, heads = 2")),
        data=bytes_of_text,
    ),
    Program(
        "stargan", "yunjey/stargan", "94dd002e93a2863d9b987a937b85925b80f7a19f", "main.py",
        "--dataset RaFD --rafd_image_dir pictures --c_dim 4 --use_tensorboard False "
        "--num_workers 8",
        small="--batch_size 2 --image_size 32 --rafd_crop_size 32 --g_conv_dim 4 --d_conv_dim 4 "
        "--g_repeat_num 1 --d_repeat_num 4 --num_workers 1",
        data=pictures("pictures", count=400, side=256),
    ),
    Program(
        "TCN", "locuslab/TCN", "2f8c2b817050206397458dfd1f5a25ce8a32fe65",
        "TCN/mnist_pixel/pmnist_test.py", small="--batch_size 2 --levels 2 --nhid 4",
    ),
    Program(
        "cleanrl ppo", "vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
        "cleanrl/ppo.py", data=carts_and_poles,
        smaller=(("num_steps: int = 128", "num_steps: int = 8"),),
    ),
    Program(
        "cleanrl dqn", "vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
        "cleanrl/dqn.py", file="cleanrl_utils/__init__.py", data=carts_and_poles,
        smaller=(("learning_starts: int = 10000", "learning_starts: int = 20"),
                 ("batch_size: int = 128", "batch_size: int = 4")),
    ),
    Program(
        "Pytorch-UNet", "milesial/Pytorch-UNet", "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
        "train.py", "-b 4 --amp --scale 1", small="-b 1 --scale 0.25",
        smaller=(("UNet(n_channels=3, n_classes=args.classes, bilinear=args.bilinear)",
                  "nn.Conv2d(3, 2, 3, padding=1)\n"
                  "    model.n_channels, model.n_classes, model.bilinear = 3, 2, False"),),
        data=masked_pictures,
    ),
    Program(
        "schedule_free", "facebookresearch/schedule_free",
        "70785b53e778d0e872c0bbb75ff4ee54ee10c291", "examples/mnist/main.py",
        file="schedulefree/__init__.py", small="--batch-size 4",
    ),
    Program(
        "Fabric", "Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        "examples/fabric/image_classifier/train_fabric.py", small="--batch-size 4",
    ),
    Program(
        "torchdiffeq", "rtqichen/torchdiffeq", "657943acefa826ef04c025ebeb1ff5e9d60dc268",
        "examples/odenet_mnist.py", file="torchdiffeq/__init__.py",
        small="--batch_size 4 --test_batch_size 80 --tol 0.1",
        smaller=(("64", "4"),),
    ),
    Program(
        "AdaBound", "Luolc/AdaBound", "2e928c3007a2fc44af0e4c97e343e1fed6986e44",
        "demos/cifar10/main.py", "--optim adabound --lr 0.001", file="adabound/__init__.py",
        smaller=(("batch_size=128", "batch_size=2"), ("num_workers=2", "num_workers=1")),
    ),
)  # fmt: skip
