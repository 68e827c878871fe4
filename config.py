"""Application settings, each defined once with its default, help text, allowed values and roles.

`Config` is the single source of truth. The absl flags are generated from it (`define_flags`) and
read once (`from_flags`). `Config` rejects invalid values and combinations before anything is built.
The names, types and defaults of the original's 48 flags are kept, except that `use_tpu` is off by
default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import flags

from runtime import console, version
from runtime.errors import UserError, first_line
from runtime.paths import check_folder, check_path, check_weights_path, hashed_name, slug

# depth -> (whether bottleneck blocks are used, number of blocks in each of the four groups). This
# dict is defined here rather than in resnet.py, because the choices for --resnet_depth must be
# known before TensorFlow is loaded.
RESNET_DEPTHS = {
    # ResNet-10 is not in the paper. It is meant for trials on small machines.
    10: (False, (1, 1, 1, 1)),
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
    200: (True, (3, 24, 36, 3)),
}
# Operators for --augment_left and --augment_right.
AUGMENTATIONS = (
    "crop",
    "color",
    "jitter",
    "drop",
    "rotate",
    "cutout",
    "noise",
    "blur",
    "sobel",
    "equalize",
    "solarize",
    "motion_blur",
    "autoaugment",
)
EXTRA_AUGMENTATIONS = ("rotate", "noise", "sobel")  # operators for --augment_extra
DEFAULT_MARGIN = 0.8  # The paper tried four margins (B.10), but does not report which was best.
# Number of training images, counted in every epoch, after which small networks have learned from a
# few hundred images; see docs/own_images.md.
MIN_SEEN_IMAGES = 64_000
RECIPES = "paper/recipes"
EVAL_PROTOCOLS = ("linear_head", "lbfgs", "knn", "contrastive")
_MAX_INT32 = 2**31 - 1


def as_flag(name: str, value: object) -> str:
    """Converts a setting to a command-line argument."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={value}"


def as_flags(settings: dict) -> list[str]:
    """Converts a dict of settings to command-line arguments for run.py."""
    return [as_flag(*setting) for setting in settings.items()]


# section title -> name of the section's first setting in `Config`
SECTIONS = {
    "Mode and paths": "mode",
    "Data": "dataset",
    "Augmentation (paper, Appendix A)": "min_crop_area",
    "Network": "resnet_depth",
    "Objective and optimization": "contrastive_loss",
    "Training": "train_batch_size",
    "Evaluation": "eval_epochs",
    "Hardware": "use_tpu",
}

# Settings that `--help` shows first.
MAIN_SETTINGS = (
    "mode",
    "train_mode",
    "model_dir",
    "checkpoint",
    "dataset",
    "image_size",
    "resnet_depth",
    "learning_rate",
    "train_batch_size",
    "train_epochs",
)
# Names for --eval_name, except those of a run's own files.
_EVAL_NAME = re.compile(
    r"(?!(best|train|saved_model|checkpoint|ckpt-.*|.*\.(csv|html|json|png|npz|lock|log))$)"
    r"[\w-][\w .-]{0,62}"
)


class Condition(NamedTuple):
    """Condition under which a setting has an effect.

    Attributes:
      holds: function of a `Config`.
      flags: description of the condition, for the message about a setting without effect.
    """

    holds: Callable[[Config], object]
    flags: str


PRETRAINING = Condition(lambda config: config.pretraining, "--train_mode=pretrain")
FINE_TUNING = Condition(lambda config: config.train_mode == "finetune", "--train_mode=finetune")
DISTILLATION = Condition(lambda config: config.train_mode == "distill", "--train_mode=distill")
PRETRAINING_AUGMENTATION = Condition(
    lambda config: config.uses_pretraining_augmentation, "--train_mode=pretrain or supervised"
)
EVALUATING = Condition(
    lambda config: config.evaluates, "--eval_epochs, or --mode=train_then_eval or eval"
)
DEVICE_AUGMENTATION = Condition(lambda config: config.augment_on == "device", "--augment_on=device")
FILES = Condition(
    lambda config: config.dataset.startswith(("folder:", "list:")),
    "--dataset=folder:PATH or list:FILE",
)
TABLES = Condition(
    lambda config: config.dataset != "digits" and not config.dataset.startswith("folder:"),
    "--dataset=list:FILE or a TFDS name",
)
LABEL_SUBSET = Condition(lambda config: config.label_fraction < 1, "--label_fraction below 1")
MARGIN_LOSS = Condition(
    lambda config: config.effective_margin is not None,
    "--contrastive_loss=margin_triplet or --semi_hard",
)
NT_XENT = Condition(
    lambda config: config.contrastive_loss == "nt_xent" and config.negatives == "both",
    "--contrastive_loss=nt_xent and --negatives=both",
)
LINEAR_HEAD = Condition(lambda config: config.has_linear_head, "--lineareval_while_pretraining")
EVALUATED_HEAD = Condition(
    lambda config: (
        config.mode != "train" and config.has_linear_head and "linear_head" in config.eval_protocols
    ),
    "--mode=train_then_eval or eval, and a linear head in --eval_protocol",
)
PROBES = Condition(
    lambda config: {"lbfgs", "knn"} & set(config.eval_protocols), "lbfgs or knn in --eval_protocol"
)
TPU = Condition(lambda config: config.use_tpu, "--use_tpu")

# Roles of settings, which `settings_with` lists.
ROLES = {
    "identity": "identifies a run: part of the default model_dir, and fixed when a run resumes",
    "network": "identifies a run, and can be inferred from a checkpoint",
    "length": "determines the training length and the schedule, and may change when a run resumes",
    "order": "affects the order of the examples, and is fixed when a run resumes",
    "pixels": "determines how image files are decoded; taken from a checkpoint",
    "evaluation": "determines the results of an evaluation",
    "of_run": "identifies a run, and is taken from it by --mode=eval",
    "data_of_run": "taken from the run by --mode=eval without --dataset",
    "labels": "determines which labels lbfgs and knn use",
    "output": "determines results and where they are written; set by programs that start run.py",
    "data_access": "determines how the files of a data set are read; `transfer` has the same flag",
    "per_worker": "may differ between the workers of a run",
    "no_effect": "has no effect on results, except for rounding and the order of the examples",
}


def setting(
    default: object,
    help_text: str,
    *roles: str,
    choices: tuple | None = None,
    items: tuple[str, ...] | None = None,
    minimum: float = -math.inf,
    above: float = -math.inf,
    maximum: float = math.inf,
    only: Condition | None = None,
) -> Any:
    """Returns a `Config` field.

    Args:
      default: value if the flag is not set.
      help_text: meaning of the setting, with its unit and source.
      *roles: keys of `ROLES`.
      choices: allowed values, or None if all values within the limits are allowed.
      items: allowed items of a comma-separated list.
      minimum: smallest value allowed.
      above: exclusive lower bound.
      maximum: largest value allowed.
      only: condition under which the setting has an effect. Otherwise, only the default is allowed.
    """
    if isinstance(default, int):  # TensorFlow uses int32 for many sizes.
        maximum = min(maximum, _MAX_INT32)
    rules = dict(choices=choices, items=items, minimum=minimum, above=above, maximum=maximum)
    return dataclasses.field(
        default=default, metadata=dict(help=help_text, only=only, roles=frozenset(roles), **rules)
    )


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Conversion of pixels to 8-bit RGB.

    Attributes:
      white_level: value of white in images with more than 8 bits, or None for the largest value of
        their type (1 for floating-point numbers). In signed images, black is the negative value.
      bands: indices of the channels to use, from 1, or an empty tuple for the usual channels.
    """

    white_level: float | None = None
    bands: tuple[int, ...] = ()


DEFAULT_CONVERSION = Conversion()


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of one run. The constructor raises `UserError` for invalid values and combinations."""

    # Mode and paths.
    mode: str = setting(
        "train",
        "train: train, and export a SavedModel; train_then_eval: also evaluate the last checkpoint;"
        " eval: evaluate and export the newest checkpoint in --model_dir (with --eval_epochs or"
        " --keep_best, all checkpoints, oldest first) and then each new one, until the last step or"
        " --eval_timeout, or only evaluate --checkpoint if it is set and the run did not start from"
        " it.",
        "output",
        choices=("train", "eval", "train_then_eval"),
    )
    train_mode: str = setting(
        "pretrain",
        "pretrain: contrastive learning; finetune: load the encoder from --checkpoint, and train it"
        " together with a classifier on labeled images, which are augmented only with random crops"
        " and flips; supervised: train from scratch on labeled images, with the pretraining"
        " augmentation and without a projection head; distill: train from scratch on the predictions"
        " of --teacher, with random crops and flips and without a projection head (SimCLR v2).",
        "of_run",
        choices=("pretrain", "finetune", "supervised", "distill"),
    )
    model_dir: str | None = setting(
        None,
        "Run directory, for checkpoints, results, TensorBoard events and SavedModels. If not set,"
        " runs/<dataset>_<network>_<hash of the settings> is used, so that running the same command"
        " again resumes the run.",
        "output",
        "per_worker",
    )
    data_dir: str | None = setting(
        None,
        "Directory of prepared TFDS data sets (if not set, TFDS's default is used), or of the images"
        " of a list (if not set, the directory of the list).",
        "data_access",
        "data_of_run",
        "per_worker",
        "no_effect",
    )
    checkpoint: str | None = setting(
        None,
        "Initial weights of a new run or, with --mode=eval, the weights to evaluate: a directory"
        " (its latest checkpoint is used), a checkpoint prefix, a SavedModel or a TF Hub handle of"
        " this program or the original (TF2 or TF1), or a ResNet from PyTorch (FILE.safetensors)."
        " Evaluation and fine-tuning take the network settings that are not set from the weights.",
        "identity",
    )
    teacher: str | None = setting(
        None,
        "Weights with a classifier or a linear head for one label per image, whose predictions a new"
        " network learns; see --checkpoint. The classes and, if not set, the image size and the"
        " decoding of images are those of the weights.",
        "identity",
        only=DISTILLATION,
    )
    seed: int | None = setting(
        None,
        "Seed for the initial weights, the order of the examples and the augmentation. If not set,"
        " a random seed is chosen once and stored in model_dir/flags.json.",
        "identity",
        minimum=0,
        maximum=_MAX_INT32,
    )

    allow_flag_changes: bool = setting(
        False,
        "Resume a run even if its settings or data have changed since it was started. The network,"
        " the optimizer and the frozen blocks cannot change.",
        "no_effect",
    )
    deterministic: bool = setting(
        False,
        "Use only deterministic TensorFlow operations, which may be slower but make runs on GPUs"
        " bitwise reproducible. Runs on CPUs are reproducible without this flag.",
    )

    # Data.
    dataset: str = setting(
        "imagenet2012",
        "A TFDS name, optionally with a config (such as imagenet2012_subset/1pct); digits"
        " (scikit-learn's data set of 1,797 images, which requires no download); folder:PATH (an"
        " image folder); list:FILE (a CSV or TSV file with paths and labels); or huggingface:NAME. In"
        " an image folder, each sub-folder is a class. Class"
        " folders may be grouped in split folders such as train/ and test/. If not set, nothing is"
        " downloaded, and --mode=eval uses the data set of the run.",
        "identity",
        "data_of_run",
    )
    labels: bool = setting(
        True,
        "Use the labels in the data. --nolabels: ignore them, for example if the sub-folders of an"
        " image folder are not classes. Folders may then contain both images and folders.",
        "identity",
        "data_of_run",
    )
    image_key: str | None = setting(
        None,
        "Column of a list, or feature of a TFDS data set, with the images. If not set: image,"
        " file_name, filename or path, or the only feature with images.",
        "identity",
        "data_of_run",
        "data_access",
        only=TABLES,
    )
    label_key: str | None = setting(
        None,
        "Column of a list, or feature of a TFDS data set, with the labels. If not set: label or class,"
        " or the only feature with class labels.",
        "identity",
        "data_of_run",
        "data_access",
        only=TABLES,
    )
    group_pattern: str | None = setting(
        None,
        "Regular expression that is searched in the path of each image, relative to the folder. Its"
        " first capturing group, or else the whole match, is the group of the image, such as a"
        " patient or a video. Slices and --label_fraction do not divide groups. In a list, this flag"
        " replaces the column group.",
        "identity",
        "data_of_run",
        "data_access",
        "evaluation",
        only=FILES,
    )
    train_split: str = setting(
        "train",
        "Split to train on. TFDS slices such as train[:10%] are supported. In an image folder,"
        " percent slices select images by a hash of their paths: adding images never moves other"
        " images to a different slice, but the sizes of the slices are approximate.",
        "identity",
        "data_of_run",
        "labels",
    )
    eval_split: str = setting(
        "validation",
        "Split to evaluate on. If not set, test is used for data sets without a validation split."
        " If train is the only split and --train_split is not set either, the last fifth of train"
        " is held out (of at least 1,000 images without labels, the last twentieth), except with"
        " --mode=train.",
        "evaluation",
        "data_of_run",
    )
    corrupt_images: str = setting(
        "error",
        "Handling of unusable images in a folder (corrupt, truncated, too large, or in an"
        " unsupported format), which are found before a run starts. error: report them and stop;"
        " skip: train and evaluate without them.",
        "data_access",
        choices=("error", "skip"),
    )
    cache_dataset: bool = setting(
        False,
        "Keep the encoded examples in memory after reading them in the first epoch.",
        "order",
        "no_effect",
    )
    shuffle_buffer_mb: int = setting(
        1024,
        "Memory limit, in MB per worker, for the shuffle buffer of encoded TFDS examples. Other"
        " data sets are shuffled completely, because shuffling their indices requires little"
        " memory.",
        "order",
        "per_worker",
        minimum=1,
    )
    label_fraction: float = setting(
        1.0,
        "Fraction of the labeled training examples to use for fine-tuning, supervised training,"
        " lbfgs and knn. The same number of examples is drawn from each class, but a class with"
        " fewer examples contributes all of them (paper, section 6). Pretraining and distillation"
        " use all images; with --distill_alpha below 1, distillation uses this fraction of the"
        " labels. TFDS splits are read once to select the examples, which are kept in memory in"
        " encoded form.",
        "identity",
        "labels",
        above=0,
        maximum=1,
    )
    label_seed: int = setting(
        0,
        "Seed for selecting examples with --label_fraction.",
        "identity",
        "labels",
        minimum=0,
        only=LABEL_SUBSET,
    )
    white_level: str | None = setting(
        None,
        "Value of white in images with more than 8 bits per channel: a number, or auto for the largest"
        " value in the training images, which is then recorded. If not set, the largest value that"
        " the file can store, or 1 for floating-point numbers. In signed images, the negative value"
        " is black.",
        "identity",
        "pixels",
        "data_access",
        "evaluation",
    )
    bands: str | None = setting(
        None,
        "Comma-separated numbers, from 1, of the three channels of each image to use as red, green"
        " and blue, such as 4,3,2 for a satellite image.",
        "identity",
        "pixels",
        "data_access",
        "evaluation",
    )
    image_size: int = setting(
        224,
        "Height and width of the network's input, in pixels.",
        "evaluation",
        "network",
        minimum=8,
        maximum=4096,
    )
    scaled_decoding: bool = setting(
        False,
        "In training, decode a JPEG file at 1/2, 1/4 or 1/8 of its size if all crops of it are at"
        " least 2, 4 or 8 times as large as --image_size. Faster, but smooths the images.",
        "identity",
        only=FILES,
    )

    # Augmentation (paper, Appendix A).
    min_crop_area: float = setting(
        0.08,
        "Minimum area of a random crop, as a fraction of the image area. Increase it if small crops"
        " carry no information. With the default, crops that cover less than 10 % of the image are"
        " rejected, as in the original.",
        "of_run",
        minimum=1e-4,
        maximum=1,
    )
    random_flip: bool = setting(
        True,
        "Flip half of the views horizontally (paper, Appendix A). Disable this if a flip changes"
        " the meaning of an image.",
        "of_run",
    )
    augmentation: str = setting(
        "simclr",
        "Augmentation of both views, except in fine-tuning. simclr: crop, flip, color distortion"
        " and blur (paper, Appendix A); autoaugment: crop, flip, and AutoAugment's policy for"
        " ImageNet from Table 9 of Cubuk et al. 2019 (CVPR); broader: simclr plus random"
        " equalization, solarization, Sobel filtering and motion blur (B.2).",
        "of_run",
        choices=("simclr", "autoaugment", "broader"),
        only=PRETRAINING_AUGMENTATION,
    )
    augment_left: str | None = setting(
        None,
        "Comma-separated operators to apply to the first view, in the given order. Replaces"
        " --augmentation (paper, Figure 5): both views start from the same random crop, and an"
        f" empty list leaves the crop unchanged. Operators: {', '.join(AUGMENTATIONS)}.",
        "of_run",
        only=PRETRAINING,
        items=AUGMENTATIONS,
    )
    augment_right: str | None = setting(
        None,
        "Same as --augment_left, but for the second view.",
        "of_run",
        only=PRETRAINING,
        items=AUGMENTATIONS,
    )
    augment_extra: str = setting(
        "",
        "Comma-separated operators to apply after --augmentation, in the given order (paper, Table"
        " 3): rotate (by 0, 90, 180 or 270 degrees); noise and sobel (each applied to half of the"
        " views).",
        "of_run",
        only=PRETRAINING_AUGMENTATION,
        items=EXTRA_AUGMENTATIONS,
    )
    color_jitter_strength: float = setting(
        1.0,
        "Strength of the color distortion; 0 disables it. Not used in fine-tuning and distillation,"
        " or with --augmentation=autoaugment.",
        "of_run",
        minimum=0,
        maximum=100,
    )
    brightness: str = setting(
        "multiplicative",
        "Brightness adjustment in the color distortion: multiplicative (as in SimCLR v2; the"
        " default of the original TF2 release) or additive (as in the paper, SimCLR v1).",
        "of_run",
        choices=("multiplicative", "additive"),
    )
    augment_on: str = setting(
        "host",
        "Where flips and color distortion are computed: host (in the input pipeline) or device (in"
        " the training step, like blur, so that fewer CPU cores can supply a GPU). Only for"
        " --augmentation=simclr. Crops are always computed on the host.",
        "no_effect",
        choices=("host", "device"),
    )
    crop_dtype: str = setting(
        "float32",
        "Type of the crops that --augment_on=device sends to the device: float32 (exact), float16"
        " (error at most 2^-12 in [0, 1]) or uint8 (at most 0.5/255; also clips values to [0, 1]).",
        "identity",
        choices=("float32", "float16", "uint8"),
        only=DEVICE_AUGMENTATION,
    )
    use_blur: bool = setting(
        True,
        "Apply Gaussian blur to half of the views, with a different random sigma (0.1 to 2) for"
        " each image. Not used in fine-tuning and distillation, with --augmentation=autoaugment,"
        " or with --augment_left or --augment_right.",
        "of_run",
    )

    # Network.
    resnet_depth: int = setting(
        50,
        "Depth of the ResNet; 10 is meant for small machines.",
        "network",
        choices=tuple(RESNET_DEPTHS),
    )
    width_multiplier: int = setting(
        1, "Width multiplier of the ResNet.", "network", minimum=1, maximum=32
    )
    sk_ratio: float = setting(
        0.0,
        "If above 0, use ResNet-D and selective kernels (SK) with this ratio. A common value is"
        " 0.0625.",
        "network",
        minimum=0,
        maximum=1,
    )
    se_ratio: float = setting(
        0.0,
        "If above 0, use squeeze-and-excitation (SE) with this ratio.",
        "network",
        minimum=0,
        maximum=1,
    )
    stem: str = setting(
        "auto",
        "First layers of the ResNet. imagenet: 7x7 convolution with stride 2, and max pooling;"
        " cifar: 3x3 convolution with stride 1, no pooling (paper, B.9); auto: cifar if"
        " --image_size is at most 32, otherwise imagenet, as in the original.",
        "network",
        choices=("auto", "imagenet", "cifar"),
    )
    batch_norm_decay: float = setting(
        0.9, "Momentum for the moving statistics in batch norm.", "identity", minimum=0, maximum=1
    )
    global_bn: bool = setting(
        True, "Compute batch statistics over all replicas instead of per replica.", "identity"
    )
    proj_head_mode: str = setting(
        "nonlinear",
        "Type of the projection head g.",
        "network",
        choices=("none", "linear", "nonlinear"),
    )
    proj_out_dim: int = setting(
        128, "Output dimension of the projection head.", "network", minimum=1, maximum=2**16
    )
    num_proj_layers: int = setting(
        3, "Number of layers in the nonlinear projection head.", "network", minimum=1, maximum=100
    )
    ft_proj_selector: int = setting(
        0,
        "Input of the linear head or classifier: 0 for the encoder's output, 1 for the output of"
        " the projection head's first layer, -1 for the output of the projection head's last"
        " layer.",
        "of_run",
        "evaluation",
    )
    lineareval_while_pretraining: bool = setting(
        True,
        "Train a linear head with labels during pretraining. The head does not affect the encoder.",
        "network",
    )
    fine_tune_after_block: int = setting(
        -1,
        "Fine-tune only the layers after this block group: -1 for all layers, 0 for those after the"
        " stem, 4 for the heads only. Earlier layers are frozen, including their batch norm"
        " statistics.",
        "of_run",
        minimum=-1,
        maximum=4,
        only=FINE_TUNING,
    )
    distill_temperature: float = setting(
        1.0,
        "Temperature of the predictions in distillation (SimCLR v2: 0.1 for the teacher's network, 1"
        " for a smaller one). LARS and momentum multiply the learning rate of the classifier by its"
        " square.",
        "identity",
        above=0,
        only=DISTILLATION,
    )
    distill_alpha: float = setting(
        1.0,
        "Weight of the teacher's predictions in distillation; that of the labels is 1 minus this"
        " value. With 1, labels are not used. Images without a label are used, too.",
        "identity",
        minimum=0,
        maximum=1,
        only=DISTILLATION,
    )
    zero_init_logits_layer: bool = setting(
        False, "Initialize the linear head or classifier with zeros.", "identity", only=LINEAR_HEAD
    )

    # Objective and optimization.
    contrastive_loss: str = setting(
        "nt_xent",
        "Contrastive loss (paper, Table 2). margin_triplet uses --margin instead of --temperature."
        " nt_logistic and margin_triplet average over the negatives and require memory quadratic in"
        " the batch size.",
        "of_run",
        choices=("nt_xent", "nt_logistic", "margin_triplet"),
        only=PRETRAINING,
    )
    negatives: str = setting(
        "both",
        "Negatives for each view of an image. both: both views of all other images; cross_view: for"
        " a first view, only the second views of the other images, and vice versa (used for all"
        " losses in the paper's Table 4).",
        "of_run",
        choices=("both", "cross_view"),
        only=PRETRAINING,
    )
    semi_hard: bool = setting(
        False,
        "Use only one negative for each view: the most similar of the negatives whose similarity is"
        " lower than that of the positive, but by less than --margin (paper, 5.1).",
        "of_run",
        only=PRETRAINING,
    )
    margin: float | None = setting(
        None,
        "Margin for margin_triplet and --semi_hard, in units of similarity. If not set,"
        f" {DEFAULT_MARGIN} is used. The paper tried 0, 0.4, 0.8 and 1.6 (B.10).",
        "of_run",
        minimum=0,
        only=MARGIN_LOSS,
    )
    temperature: float = setting(
        0.1,
        "Temperature for the contrastive loss, contrastive accuracy and entropy.",
        "of_run",
        above=0,
    )
    hidden_norm: bool = setting(
        True, "L2-normalize the projections in the contrastive loss.", "of_run"
    )
    loss_block_rows: int = setting(
        0,
        "Maximum number of rows of the similarity matrix that each replica keeps in memory at once."
        " 0: all rows if they require at most 64 MiB, otherwise blocks of 16 MiB with at least 256"
        " rows. The loss does not depend on the block size.",
        minimum=0,
        only=NT_XENT,
    )
    optimizer: str = setting(
        "lars",
        "Optimizer. momentum: SGD with Nesterov momentum.",
        "of_run",
        choices=("momentum", "adam", "lars"),
    )
    learning_rate: float = setting(
        0.3,
        "Peak learning rate, before scaling by the batch size (see --learning_rate_scaling).",
        "identity",
        minimum=0,
    )
    learning_rate_scaling: str = setting(
        "linear",
        "Scaling of the learning rate with the batch size. linear: learning_rate * train_batch_size"
        " / 256; sqrt: learning_rate * sqrt(train_batch_size) (paper, B.1).",
        "identity",
        choices=("linear", "sqrt"),
    )
    linear_head_learning_rate: float | None = setting(
        None,
        "Peak learning rate of the linear head for a batch size of 256, always scaled linearly with"
        " the batch size; try 0.03. If not set, the head uses the encoder's learning rate, which is"
        " unstable on small data sets. The encoder is not affected.",
        "identity",
        above=0,
        only=PRETRAINING,
    )
    warmup_epochs: float = setting(
        10.0, "Epochs of linear warm-up.", "identity", minimum=0, maximum=10**6
    )
    momentum: float = setting(
        0.9, "Momentum of LARS and of momentum SGD.", "identity", minimum=0, maximum=1
    )
    weight_decay: float = setting(
        1e-6,
        "Weight decay coefficient. With LARS, the decay of kernels is part of the update, except"
        " for the linear head, whose decay is part of the loss. With other optimizers, the decay of"
        " all variables except those of batch norm is part of the loss.",
        "of_run",
        minimum=0,
    )

    # Training.
    train_batch_size: int = setting(
        512,
        "Batch size for training, summed over all replicas. 0: the largest power of two that is at"
        " most a quarter of the number of training images, from 32 to 512.",
        "of_run",
        minimum=0,
        maximum=2**20,
    )
    train_epochs: int = setting(
        100,
        f"Training length in epochs. 0: {MIN_SEEN_IMAGES:,} divided by the number of training images,"
        " but at least 100.",
        "length",
        minimum=0,
        maximum=10**6,
    )
    train_steps: int = setting(
        0, "Training length in steps; if above 0, overrides --train_epochs.", "length", minimum=0
    )
    checkpoint_epochs: int = setting(
        1, "Epochs between checkpoints.", "no_effect", minimum=1, maximum=10**6
    )
    checkpoint_steps: int = setting(
        0,
        "Steps between checkpoints; if above 0, overrides --checkpoint_epochs.",
        "no_effect",
        minimum=0,
    )
    keep_checkpoint_max: int = setting(5, "Number of checkpoints to keep.", "no_effect", minimum=1)
    keep_best: bool = setting(
        False,
        "Keep the best weights across all evaluations in model_dir/best or, with --eval_name, in"
        " model_dir/<eval_name>/best. The best weights have the highest linear-head accuracy (for"
        " multi-label data, the highest 11-point mAP) or, without a linear head, the highest knn"
        " accuracy.",
        "no_effect",
        only=EVALUATING,
    )
    keep_hub_module_max: int = setting(
        1, "Number of SavedModels to keep; 0 keeps all.", "no_effect", minimum=0
    )

    micro_batch_size: int = setting(
        0,
        "Number of examples, over all replicas, whose activations are in memory at the same time;"
        " must divide --train_batch_size. The gradient is still that of the loss over the whole"
        " batch (Gao et al. 2021), but batch norm uses the statistics of each micro-batch, and"
        " every image passes through the encoder twice. 0: the whole batch.",
        "identity",
        minimum=0,
    )
    precision: str = setting(
        "float32",
        "Compute precision of the network: float32; mixed_bfloat16 (recent CPUs, GPUs and TPUs);"
        " mixed_float16 (GPUs, with loss scaling). On TPUs, float32 products also have bfloat16"
        " inputs. Variables, the loss, statistics, LARS and the"
        " last layers of the heads stay in float32, so checkpoints are interchangeable across the"
        " three settings.",
        "identity",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )
    jit_compile: bool | None = setting(
        None,
        "Compile the training step with XLA. The first step takes longer. On GPUs, the other steps"
        " are faster; on CPUs, they are slower. Results differ by rounding errors. If not set, the"
        " step is compiled on a single GPU, except with --deterministic.",
        "no_effect",
    )

    # Evaluation.
    eval_epochs: int = setting(
        0,
        "Number of epochs between evaluations during training. 0: none. Each evaluation covers the"
        " linear head, knn and, in pretraining, the contrastive loss. A checkpoint is written"
        " before each evaluation. knn computes the features of the whole training split, which"
        " takes about a third of the time of an epoch. With --mode=eval, any value above 0 selects"
        " all checkpoints instead of the newest.",
        "no_effect",
        minimum=0,
        maximum=10**6,
    )
    eval_steps: int = setting(
        0,
        "Number of batches to evaluate. 0: the whole split, each example exactly once.",
        minimum=0,
    )
    eval_center_crop: bool = setting(
        True,
        "If --image_size is above 32, evaluate on a center crop of 87.5 % of the shorter side (224"
        " of 256 pixels; paper, B.5). Otherwise, and with --noeval_center_crop, the center crop"
        " covers the whole shorter side (B.8.1).",
        "evaluation",
    )
    eval_resize: str = setting(
        "crop",
        "How evaluation makes images square. crop: use the center; squash: resize both sides to"
        " --image_size; pad: add black borders.",
        "evaluation",
        "pixels",
        choices=("crop", "squash", "pad"),
    )
    save_predictions: bool = setting(
        False,
        "Write the labels and linear-head logits of all examples to predictions_<step>.npz, for "
        "`python -m transfer compare`.",
        "no_effect",
        only=EVALUATED_HEAD,
    )
    eval_batch_size: int = setting(
        256,
        "Global batch size for evaluation (the total over all replicas).",
        "evaluation",
        minimum=1,
        maximum=2**20,
    )
    eval_protocol: str = setting(
        "linear_head",
        "Comma-separated evaluation protocols: linear_head; lbfgs (logistic regression on the"
        " frozen encoder); knn (nearest neighbors by cosine similarity, on the frozen encoder);"
        " contrastive (the pretraining task on held-out images). Without a linear head, linear_head"
        " is replaced with contrastive and, if there are labels, knn. Evaluations of a pretraining"
        " run always include contrastive, on at most 2,048 images if it is not in the list.",
        "evaluation",
        items=EVAL_PROTOCOLS,
    )
    eval_baselines: bool = setting(
        False,
        "Also run lbfgs and knn on an untrained encoder and on raw pixels, with the same splits.",
        only=PROBES,
    )
    eval_projections: bool = setting(
        False,
        "Also run lbfgs and knn on the projections z = g(h) (paper, 4.2 and Figure 8).",
        only=PROBES,
    )
    eval_name: str | None = setting(
        None,
        "Sub-folder of model_dir for the results of this evaluation and, with --mode=eval, for its"
        " SavedModels.",
        "output",
    )
    eval_timeout: float = setting(
        0.0,
        "Seconds without a new checkpoint after which --mode=eval ends. 0: no limit, but --model_dir"
        " must exist.",
        "no_effect",
        minimum=0,
    )

    # Hardware.
    use_tpu: bool = setting(False, "Run on a TPU.", "no_effect")
    tpu_name: str | None = setting(
        None,
        "Name or address (grpc://HOST:8470) of the Cloud TPU, or 'local' on a TPU VM; requires"
        " --use_tpu. If not set, the environment variable TPU_NAME or the TPU of the VM is used.",
        "no_effect",
        only=TPU,
    )
    tpu_zone: str | None = setting(
        None,
        "Zone of the Cloud TPU. If not set, it is detected automatically.",
        "no_effect",
        only=TPU,
    )
    gcp_project: str | None = setting(
        None,
        "Google Cloud project of the TPU. If not set, it is detected automatically.",
        "no_effect",
        only=TPU,
    )
    master: str | None = setting(
        None, "Alias for --tpu_name, kept from the original.", "no_effect", only=TPU
    )
    cluster: str = setting(
        "tf_config",
        "Source of the addresses of the workers. tf_config: the environment variable TF_CONFIG (if"
        " it is not set, the run uses one worker); slurm: the tasks of this Slurm job step, started"
        " with srun, form one run.",
        "no_effect",
        choices=("tf_config", "slurm"),
    )
    collective: str = setting(
        "auto",
        "Communication between workers. nccl: NVIDIA's library for GPUs; ring: gRPC; auto: nccl if"
        " the workers have GPUs, otherwise ring.",
        "no_effect",
        choices=("auto", "nccl", "ring"),
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_value(field, getattr(self, field.name))
        for name, check in (
            ("model_dir", check_path),
            ("checkpoint", check_weights_path),
            ("teacher", check_weights_path),
            ("data_dir", functools.partial(check_path, allow_patterns=True)),
        ):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check(name, getattr(self, name)))
        _check_combinations(self)

    # Properties derived from the settings.

    @property
    def pretraining(self) -> bool:
        """Returns whether this run pretrains with the contrastive loss."""
        return self.train_mode == "pretrain"

    @property
    def uses_pretraining_augmentation(self) -> bool:
        """Returns whether views are augmented as in pretraining, rather than only cropped and flipped."""
        return self.train_mode in ("pretrain", "supervised")

    @property
    def drops_unlabeled(self) -> bool:
        """Returns whether only images with a label are used for training."""
        return self.train_mode in ("finetune", "supervised")

    @property
    def trains_on_labels(self) -> bool:
        """Returns whether labels are used for training. Distillation also uses images without a label."""
        return self.drops_unlabeled or self.distill_alpha < 1

    @property
    def weights_flag(self) -> str:
        """Returns the name of the setting with the path of the teacher or of the initial weights."""
        is_student = self.train_mode == "distill" and self.mode != "eval"
        return "teacher" if is_student else "checkpoint"

    @property
    def weights(self) -> str | None:
        """Returns the path of the teacher in distillation, and otherwise of the initial weights."""
        return getattr(self, self.weights_flag)

    @property
    def conversion(self) -> Conversion:
        """Returns how pixels are converted to 8-bit RGB."""
        white_level = None if self.white_level in (None, "auto") else float(self.white_level)
        return Conversion(white_level, tuple(map(int, self.bands.split(","))) if self.bands else ())

    @property
    def center_crop_eval(self) -> bool:
        """Returns whether evaluation crops images to 87.5 % of the shorter side instead of the whole shorter side."""
        return self.eval_center_crop and self.image_size > 32

    @property
    def branch_operators(self) -> tuple[tuple[str, ...], ...] | None:
        """Returns each view's operator names, or None if neither `augment_left` nor `augment_right` is set."""
        if self.augment_left is None and self.augment_right is None:
            return None
        return tuple(
            _split_names(text) for text in (self.augment_left or "", self.augment_right or "")
        )

    @property
    def extra_augmentations(self) -> tuple[str, ...]:
        """Returns the operator names in `augment_extra`, in order."""
        return _split_names(self.augment_extra)

    @property
    def blurs_views(self) -> bool:
        """Returns whether views are blurred on the device."""
        return (
            self.use_blur
            and self.uses_pretraining_augmentation
            and self.augmentation in ("simclr", "broader")
            and self.branch_operators is None
        )

    @property
    def effective_proj_head_mode(self) -> str:
        """Returns `proj_head_mode`, or "none" in training from scratch, which uses no projection head."""
        return "none" if self.train_mode in ("supervised", "distill") else self.proj_head_mode

    @property
    def effective_num_proj_layers(self) -> int:
        """Returns the number of layers in the model's projection head."""
        return {"none": 0, "linear": 1, "nonlinear": self.num_proj_layers}[
            self.effective_proj_head_mode
        ]

    @property
    def linear_head_on_projections(self) -> bool:
        """Returns whether the linear head is attached to a layer of the projection head instead of the encoder."""
        return (
            self.has_linear_head
            and self.ft_proj_selector % (self.effective_num_proj_layers + 1) > 0
        )

    @property
    def has_linear_head(self) -> bool:
        """Returns whether the model has a linear head or classifier."""
        return not self.pretraining or self.lineareval_while_pretraining

    @property
    def head_name(self) -> str:
        """Returns the name of the linear head or classifier in the output."""
        return "linear head" if self.pretraining else "classifier"

    @property
    def effective_margin(self) -> float | None:
        """Returns the margin of the contrastive loss, or None if the loss has no margin."""
        if self.contrastive_loss != "margin_triplet" and not self.semi_hard:
            return None
        return DEFAULT_MARGIN if self.margin is None else self.margin

    @property
    def stem_name(self) -> str:
        """Returns the type of the stem: `imagenet` or `cifar`."""
        return "cifar" if self.cifar_stem else "imagenet"

    @property
    def cifar_stem(self) -> bool:
        """Returns whether the stem is a 3x3 convolution without pooling."""
        return self.image_size <= 32 if self.stem == "auto" else self.stem == "cifar"

    @property
    def trains(self) -> bool:
        """Returns whether this run trains."""
        return self.mode != "eval"

    @property
    def evaluates_last_step(self) -> bool:
        """Returns whether this run evaluates weights with `eval_protocol`, rather than only during training."""
        return self.mode != "train"

    @property
    def evaluates(self) -> bool:
        """Returns whether this run evaluates any weights."""
        return self.evaluates_last_step or self.eval_epochs > 0

    @property
    def eval_protocols(self) -> tuple[str, ...]:
        """Returns the protocol names in `eval_protocol`, in order."""
        return _split_names(self.eval_protocol)

    @property
    def tpu_address(self) -> str | None:
        """Returns the TPU name or address, from `--tpu_name` or `--master`."""
        return self.tpu_name or self.master

    @property
    def network_name(self) -> str:
        """Returns a short name for the network, such as resnet50_2x_sk."""
        suffixes = [f"_{self.width_multiplier}x"] if self.width_multiplier > 1 else []
        suffixes += ["_sk"] if self.sk_ratio > 0 else []
        suffixes += ["_se"] if self.se_ratio > 0 else []
        return f"resnet{self.resnet_depth}" + "".join(suffixes)

    def settings(self) -> dict:
        """Returns all settings, keyed by name."""
        return dataclasses.asdict(self)

    def identity(self) -> dict:
        """Returns the settings that identify a run and differ from their defaults, keyed by name."""
        values = {
            name: getattr(self, name) for name in settings_with("identity", "network", "of_run")
        }
        return {name: value for name, value in values.items() if value != getattr(Config, name)}

    def default_model_dir(self) -> str:
        """Returns runs/<dataset>_<network>_<hash of `identity`>.

        The name depends only on `identity`, so running the same command again resumes the run.
        """
        name = slug(self.dataset.strip("/").rsplit(":", 1)[-1]).strip("._")[-40:]
        return hashed_name(f"runs/{name}_{self.network_name}", self.identity())

    def replace(self, **changes: Any) -> Config:
        """Returns a validated copy with some settings changed."""
        return dataclasses.replace(self, **changes)


def settings_with(*roles: str) -> tuple[str, ...]:
    """Returns the names of all settings with at least one of the roles in `ROLES`, in order of definition."""
    assert ROLES.keys() >= set(roles)
    return tuple(
        field.name
        for field in dataclasses.fields(Config)
        if field.metadata["roles"].intersection(roles)
    )


def _split_names(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list of names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _check_value(field: dataclasses.Field, value: Any) -> None:
    """Checks one setting against the limits of its field."""
    default = "unset" if field.default is None else field.default
    if value is None:
        if field.default is None:
            return
        raise UserError(
            f"--{field.name}: the value is missing. Specify a value, such as the default {default}."
        )
    rules, flag, problem = field.metadata, as_flag(field.name, value), None
    if rules["choices"] and value not in rules["choices"]:
        allowed = ", ".join(str(choice) for choice in rules["choices"])
        problem = f"the value is not supported. Use one of {allowed}."
    for item in _split_names(value) if rules["items"] else ():
        if item not in rules["items"]:
            problem = f"{item} is not supported. Use any of {', '.join(rules['items'])}."
    if isinstance(value, float) and not math.isfinite(value):
        problem = f"the value is not finite. Use a finite number (default {default})."
    elif isinstance(value, (int, float)):
        minimum, above, maximum = rules["minimum"], rules["above"], rules["maximum"]
        if value <= above:
            problem = f"the value is too small. Use a value above {above} (default {default})."
        if value < minimum:
            problem = f"the value is too small. Use at least {minimum} (default {default})."
        if value > maximum:
            problem = f"the value is too large. Use at most {maximum} (default {default})."
    if problem:
        raise UserError(f"{flag}: {problem}")


class Contradiction(NamedTuple):
    """A rule that settings must not contradict.

    Attributes:
      setting: name of the setting to report.
      applies: function of a `Config` that returns whether the settings contradict each other.
      problem: text, in which `{config}` stands for the settings.
      remedy: one or more sentences, or an empty text.
    """

    setting: str
    applies: Callable[[Config], Any]
    problem: str
    remedy: str


class SettingError(UserError):
    """A setting that contradicts others, or has no effect. `line` states the problem without a remedy."""

    def __init__(self, setting: str, value: object, problem: str, remedy: str):
        self.setting, self.line = setting, f"{as_flag(setting, value)}: {problem}"
        super().__init__(f"{self.line}. {remedy}".rstrip())


_CONTRADICTIONS = (
    Contradiction(
        "white_level",
        lambda config: (
            not re.fullmatch(r"auto|(?=.*[1-9])\d+(\.\d*)?", config.white_level or "auto")
        ),
        "the value must be auto or a positive number",
        "",
    ),
    Contradiction(
        "bands",
        lambda config: not re.fullmatch(r"([1-9]\d*,){2}[1-9]\d*|", config.bands or ""),
        "the value must be three numbers from 1, such as 4,3,2",
        "",
    ),
    Contradiction(
        "group_pattern",
        lambda config: not _is_pattern(config.group_pattern or ""),
        "the regular expression is not valid",
        "Correct it (Python syntax).",
    ),
    Contradiction(
        "label_fraction",
        lambda config: (
            config.label_fraction < 1
            and not config.trains_on_labels
            and config.mode != "eval"
            and not (config.mode == "train_then_eval" and PROBES.holds(config))
        ),
        "--train_mode={config.train_mode} uses all images",
        "Use this flag only with --mode=eval, in distillation with --distill_alpha below 1, or"
        " with --mode=train_then_eval and lbfgs or knn in --eval_protocol. To train on fewer"
        " images, use a slice such as --train_split='train[:10%]'.",
    ),
    Contradiction(
        "checkpoint",
        lambda config: (
            config.train_mode in ("supervised", "distill")
            and config.checkpoint
            and config.mode != "eval"
        ),
        "--train_mode={config.train_mode} starts from scratch",
        "Remove --checkpoint, or use --train_mode=finetune.",
    ),
    Contradiction(
        "ft_proj_selector",
        lambda config: (
            not (
                -config.effective_num_proj_layers - 1
                <= config.ft_proj_selector
                <= config.effective_num_proj_layers
            )
        ),
        "the projection head has no such layer",
        "Use a value from -1 to {layers}, the number of its layers.",
    ),
    Contradiction(
        "linear_head_learning_rate",
        lambda config: config.linear_head_learning_rate and config.optimizer == "adam",
        "this flag is not supported with --optimizer=adam, whose updates do not depend on the"
        " scale of the gradients",
        "Remove the flag.",
    ),
    Contradiction(
        "linear_head_learning_rate",
        lambda config: config.linear_head_learning_rate and config.learning_rate == 0,
        "the linear head follows the schedule of --learning_rate, which is 0",
        "Increase --learning_rate.",
    ),
    Contradiction(
        "semi_hard",
        lambda config: config.semi_hard and config.contrastive_loss == "nt_xent",
        "nt_xent already weights negatives by their hardness",
        "Remove the flag, or use --contrastive_loss=nt_logistic or margin_triplet.",
    ),
    Contradiction(
        "margin",
        lambda config: config.semi_hard and config.margin == 0,
        "--semi_hard selects no negatives with a margin of 0",
        "Increase --margin.",
    ),
    Contradiction(
        "augment_on",
        lambda config: (
            config.augment_on == "device"
            and (
                config.augmentation != "simclr"
                or config.extra_augmentations
                or config.branch_operators
            )
        ),
        "only the operators of --augmentation=simclr can be computed on the device",
        "Use host, or remove --augmentation, --augment_extra, --augment_left and --augment_right.",
    ),
    Contradiction(
        "augment_extra",
        lambda config: config.branch_operators is not None and config.extra_augmentations,
        "this flag cannot be combined with --augment_left or --augment_right",
        "Add its operators to these flags.",
    ),
    Contradiction(
        "augmentation",
        lambda config: config.branch_operators is not None and config.augmentation != "simclr",
        "this value cannot be combined with --augment_left or --augment_right",
        "Remove --augmentation, or remove the other two flags.",
    ),
    Contradiction(
        "color_jitter_strength",
        lambda config: (
            config.color_jitter_strength == 0
            and {"color", "jitter"} & set(sum(config.branch_operators or (), ()))
        ),
        "color and jitter have no effect with strength 0",
        "Increase the strength, or remove them from --augment_left and --augment_right.",
    ),
    Contradiction(
        "micro_batch_size",
        lambda config: (
            config.micro_batch_size and config.train_batch_size % config.micro_batch_size
        ),
        "the value does not divide --train_batch_size={config.train_batch_size}",
        "Use one of its divisors.",
    ),
    Contradiction(
        "train_batch_size",
        lambda config: config.train_batch_size == 1,
        "a batch needs several images",
        "Use at least 2, or 0 to derive the value from the data.",
    ),
    Contradiction(
        "eval_protocol",
        lambda config: not config.eval_protocols,
        "the list is empty",
        "Use any of {protocols}.",
    ),
    Contradiction(
        "eval_protocol",
        lambda config: not config.pretraining and "contrastive" in config.eval_protocols,
        "contrastive is only valid with --train_mode=pretrain",
        "Use linear_head, lbfgs or knn.",
    ),
    Contradiction(
        "eval_projections",
        lambda config: config.eval_projections and not config.effective_num_proj_layers,
        "the model has no projection head",
        "Remove the flag.",
    ),
    Contradiction(
        "keep_best",
        lambda config: (
            config.keep_best
            and config.pretraining
            and config.mode != "eval"
            and config.eval_epochs
            and config.label_fraction < 1
            and "knn" in config.eval_protocols
            and not EVALUATED_HEAD.holds(config)
        ),
        "only the last evaluation uses --label_fraction, so its accuracy cannot be compared with"
        " those during training",
        "Remove --eval_epochs, or evaluate a linear head.",
    ),
    Contradiction(
        "keep_best",
        lambda config: (
            config.keep_best
            and (not config.eval_epochs or config.mode == "eval")
            and not {"linear_head", "knn"} & set(config.eval_protocols)
        ),
        "this flag requires an accuracy",
        "Add linear_head or knn to --eval_protocol.",
    ),
    Contradiction(
        "eval_name",
        lambda config: config.eval_name and not _EVAL_NAME.fullmatch(config.eval_name),
        "the value is not a valid name for a sub-folder, or is reserved for the run's files",
        "Use a name of at most 63 letters, digits, spaces, dots, hyphens and underscores.",
    ),
    Contradiction(
        "cluster",
        lambda config: config.use_tpu and config.cluster == "slurm",
        "one process controls a TPU of any size",
        "Remove this flag, and start one process.",
    ),
    Contradiction(
        "precision",
        lambda config: config.use_tpu and config.precision == "mixed_float16",
        "TPUs do not support float16",
        "Use mixed_bfloat16.",
    ),
    Contradiction(
        "micro_batch_size",
        lambda config: config.use_tpu and config.micro_batch_size,
        "micro-batches are not supported on TPUs",
        "Remove this flag, and use more TPU cores for larger batches.",
    ),
    Contradiction(
        "jit_compile",
        lambda config: config.use_tpu and config.jit_compile,
        "XLA always compiles programs for TPUs",
        "Remove the flag.",
    ),
    Contradiction(
        "master",
        lambda config: config.tpu_name and config.master and config.tpu_name != config.master,
        "--tpu_name={config.tpu_name} specifies a different TPU",
        "Remove one of the flags.",
    ),
)


def _is_pattern(text: str) -> bool:
    """Returns whether a text is a valid regular expression."""
    try:
        return bool(re.compile(text))
    except re.error:
        return False


def _check_combinations(config: Config) -> None:
    """Rejects settings without effect, and contradictions between settings."""
    for field in dataclasses.fields(config):
        only, value = field.metadata["only"], getattr(config, field.name)
        if only and value != field.default and not only.holds(config):
            problem = f"this flag has no effect without {only.flags}"
            raise SettingError(field.name, value, problem, "Remove it, or change these flags.")
    for rule in _CONTRADICTIONS:
        if rule.applies(config):
            problem, remedy = (
                text.format(
                    config=config,
                    layers=config.effective_num_proj_layers,
                    protocols=", ".join(EVAL_PROTOCOLS),
                )
                for text in (rule.problem, rule.remedy)
            )
            raise SettingError(rule.setting, getattr(config, rule.setting), problem, remedy)


def select_settings(content: dict, path: str) -> dict:
    """Returns the settings in the content of the file `path`.

    Raises:
      UserError: a value has the wrong type.
    """
    types = typing.get_type_hints(Config)
    settings = {name: value for name, value in content.items() if name in types}
    for name, value in settings.items():
        allowed = typing.get_args(types[name]) or (types[name],)
        # JSON may store a float setting as an integer. isinstance() would accept a bool as an int.
        if type(value) not in allowed and not (type(value) is int and float in allowed):
            raise UserError(f"{path}: {name} has the wrong type. Restore the file.")
    return settings


# Flags in the commands of the original's READMEs. The original's TF1 code defines them, but the TF2
# code does not.
_IGNORED_FLAGS = ("train_summary_steps", "variable_schema")
_DEFINE: dict[type, Callable] = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    str: flags.DEFINE_string,
}


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines one absl flag for each field of `Config`, and the flags that are accepted but have no effect."""
    types = typing.get_type_hints(Config)
    field: Any
    for field in dataclasses.fields(Config):
        flag_type = next(
            type_
            for type_ in typing.get_args(types[field.name]) or (types[field.name],)
            if type_ is not type(None)
        )
        define: Any = _DEFINE[flag_type]
        arguments: list[Any] = [field.name, field.default, field.metadata["help"]]
        if field.metadata["choices"] and flag_type is str:
            define = flags.DEFINE_enum
            arguments.insert(2, field.metadata["choices"])
        define(*arguments, flag_values=flag_values)
    for name in _IGNORED_FLAGS:
        flags.DEFINE_string(name, None, "No effect.", flag_values=flag_values)


def format_help(flag_values: flags.FlagValues) -> str:
    """Returns the names, defaults and help text of all flags by section, starting with the most important flags."""
    title_of, sections = {name: title for title, name in SECTIONS.items()}, {"": flags.FlagValues()}
    for field in dataclasses.fields(Config):
        if field.name in title_of:
            values = sections.setdefault(title_of[field.name], flags.FlagValues())
        (sections[""] if field.name in MAIN_SETTINGS else values)[field.name] = flag_values[
            field.name
        ]
    return "\n\n".join(
        f"{title or 'Main flags'}:\n{values.get_help(include_special_flags=False)}"
        for title, values in sections.items()
    )


def find_recipes(arguments: list[str]) -> list[str]:
    """Completes the paths of recipes, if the working directory contains no paper/recipes."""
    own = os.path.dirname(os.path.abspath(__file__)) if not os.path.isdir(RECIPES) else "."
    return [argument.replace(f"={RECIPES}/", f"={own}/{RECIPES}/") for argument in arguments]


def from_arguments(arguments: list[str], flag: str = "--flags") -> Config:
    """Parses run.py's command-line arguments into a `Config`.

    Raises:
      UserError: the arguments are invalid. If they cannot be parsed, the message starts with
        `flag`.
    """
    return from_flags(_parse(arguments, flag))


def parse_settings(text: str, flag: str = "--flags") -> dict:
    """Parses run.py's flags, quoted as in a shell, into a dict mapping names to values.

    Raises:
      UserError: the flags cannot be parsed. The message starts with `flag`.
    """
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"{flag}={text}: invalid quoting ({first_line(error)}). Correct the quotes."
        ) from error
    values = _parse(arguments, flag)
    return {name: values[name].value for name in given_flags(values)}


# remedy -> flags of similar programs, and values for which there is another flag or name
_OTHER_NAMES = {
    "Use --train_batch_size": "batch batch_size bs",
    "Use --train_epochs": "epochs max_epochs n_epochs num_epochs",
    "Use --learning_rate": "lr",
    "Use --weight_decay": "wd",
    "Use --temperature": "tau temp",
    "Use --image_size": "crop_size img_size input_size",
    "Use --proj_out_dim": "feature_dim out_dim",
    "Use --resnet_depth": "arch backbone model network",
    "Use --model_dir": "log_dir out output output_dir save_dir",
    "Use --dataset=folder:PATH": "data data_path root train_dir",
    "Use --checkpoint": "ckpt pretrained weights",
    "Use --precision=mixed_bfloat16 or mixed_float16": "amp bf16 fp16",
    "Run the same command again, which resumes the run": "resume",
    "Remove it: all processor cores are used": "j num_workers workers",
    "Remove it: all GPUs in CUDA_VISIBLE_DEVICES are used": "device devices gpu gpus use_gpu",
    "Use --mode=train or train_then_eval": "mode=pretrain mode=training",
    "Use --train_mode=finetune --checkpoint=PATH": "mode=finetune",
    "Use --mode=eval": "mode=test",
    "Use --optimizer=momentum": "optimizer=sgd",
}


def describe_parse_error(error: flags.Error) -> str:
    """Returns the message of an absl parse error as a single line with a remedy."""
    line = first_line(error)
    line = f"{line[:1].lower()}{line[1:]}".rstrip(".")
    flag = re.search(r"flag '?-*([\w=]*)", line)
    for remedy, names in _OTHER_NAMES.items():
        if flag and flag[1] in names.split():
            return f"{line.partition('. ')[0]}. {remedy}."
    return line if line.endswith("?") else f"{line}. See `python run.py --help`."


def _parse(arguments: list[str], flag: str) -> flags.FlagValues:
    values = flags.FlagValues()
    define_flags(values)
    try:
        rest = values(["run.py", *arguments])
    except flags.Error as error:
        raise UserError(f"{flag}: {describe_parse_error(error)}") from error
    if rest[1:]:
        raise UserError(f"{flag}: {rest[1]} is not a flag. Write settings as --name=value.")
    return values


def from_flags(flag_values: flags.FlagValues) -> Config:
    """Builds a `Config` from parsed flags. Raises `UserError` for invalid settings."""
    return Config(
        **{field.name: flag_values[field.name].value for field in dataclasses.fields(Config)}
    )


def read_command_line(description: str, arguments: list[str]) -> tuple[Config, list[str]]:
    """Reads the command line of run.py, before TensorFlow is loaded.

    Prints the help or the version and exits if requested. Logs which settings have no effect, and
    that TensorFlow is loaded next.

    Args:
      description: first line of the help.
      arguments: command line, without the name of the program.

    Returns:
      The settings, and the names of those that the user set.

    Raises:
      UserError: the flags cannot be parsed, or settings are invalid.
    """
    values = flags.FlagValues()
    define_flags(values)
    if {"-h", "--help", "--helpshort", "--helpfull"} & set(arguments):
        usage = f"{description}\n\npython run.py [flags]\n{format_help(values)}"
        console.log(f"{usage}\n--flagfile=FILE: Read flags from a file.")
        sys.exit(0)
    if "--version" in arguments:
        console.log(version.describe())
        sys.exit(0)
    argv = find_recipes(["run.py", *arguments])
    try:
        rest = values(argv)
    except flags.CantOpenFlagFileError as error:
        reason = str(error.__context__ or error)
        raise UserError(f"--flagfile: {reason}. Check its path and permissions.") from error
    except flags.Error as error:
        raise UserError(describe_parse_error(error)) from error
    except ValueError as error:  # absl does not catch decoding errors in flag files.
        raise UserError(
            f"--flagfile: a flag file cannot be read as text ({first_line(error)}). Save it as"
            " UTF-8."
        ) from error
    if rest[1:]:
        raise UserError(f"{rest[1]!r} is not a flag. Write settings as --name=value.")
    lines = resolve_contradictions(argv, values)
    config = from_flags(values)
    kind, _, path = (config.dataset or "").partition(":")
    if kind == "folder":
        check_folder(path)
    if kind == "list" and not os.path.isfile(os.path.expanduser(path)):
        raise UserError(f"--dataset={config.dataset}: the file does not exist. Check the path.")
    if ignored := [f"--{name}" for name in _IGNORED_FLAGS if values[name].present]:
        lines.append(
            f"flags without effect: {', '.join(ignored)} (accepted because the original's READMEs"
            " set them)"
        )
    console.log_lines([*lines, "loading TensorFlow"])
    return config, given_flags(values)


def resolve_contradictions(argv: list[str], flag_values: flags.FlagValues) -> list[str]:
    """Resets settings in flag files that contradict the command line.

    If the settings in the flag files contradict each other, none is reset.

    Args:
      argv: command line.
      flag_values: flags parsed from `argv`.

    Returns:
      A line to log for each setting that was reset.
    """
    arguments = flag_values.read_flags_from_files(argv[1:])
    lines: list[str] = []
    with contextlib.suppress(UserError):  # absl's own flags, or invalid flag files
        typed = given_flags(_parse([text for text in arguments if text in argv], "argv"))
        from_arguments([text for text in arguments if text not in argv])
        for _ in range(len(arguments)):
            try:
                from_flags(flag_values)
                break
            except SettingError as error:
                if error.setting in typed:
                    break
                flag_values[error.setting].unparse()
                lines.append(f"ignored in the flag file: {error.line}")
    return lines


def given_flags(flag_values: flags.FlagValues) -> list[str]:
    """Returns the names of the settings that are set on the command line or in a flag file."""
    return [field.name for field in dataclasses.fields(Config) if flag_values[field.name].present]
