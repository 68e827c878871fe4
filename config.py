"""Every setting of the application, once: its default, meaning, allowed values and checks.

`Config` is the single source: absl flags are generated from it (`define_flags`), read once (`from_flags`), and it
refuses values and combinations that cannot work before anything is built. The names, types and defaults of the
original's 48 flags are kept, except that `use_tpu` is off by default.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before the imports, which take seconds.
    from runtime import command_line
    command_line.exit_not_a_program(__file__)

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import shlex
import typing
from typing import Any

from absl import flags

from runtime.errors import UserError, first_line
from runtime.paths import check_path, check_weights_path, slug

# depth -> (whether blocks are bottlenecks, blocks in each of the four groups). Here rather than in resnet.py, because
# the choices of --resnet_depth must be known before TensorFlow is loaded.
RESNET_DEPTHS = {
    10: (False, (1, 1, 1, 1)),  # Not in the paper: for trials on small machines.
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
    200: (True, (3, 24, 36, 3)),
}
AUGMENTATIONS = ("crop", "color", "jitter", "drop", "rotate", "cutout", "noise", "blur", "sobel", "equalize",
                 "solarize", "motion_blur", "autoaugment")  # names for one branch
EXTRA_AUGMENTATIONS = ("rotate", "noise", "sobel")
MAX_IMAGE_PIXELS = 100_000_000
DEFAULT_MARGIN = 0.8  # one of those that the paper tried; it does not say which was best
EVAL_PROTOCOLS = ("linear_head", "lbfgs", "knn", "contrastive")
_INT32 = 2**31 - 1  # No setting needs more, and TensorFlow's sizes are int32 in many places.
_SMALLEST, _LARGEST = 1e-30, 1e30  # Within float32, also after a product with a batch size or a square root.


def as_flag(name: str, value: object) -> str:
    """A setting as one types it."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={value}"


def as_flags(settings: dict) -> list[str]:
    """Settings, as a dict, as arguments of run.py."""
    return [as_flag(*setting) for setting in settings.items()]


_LONGEST_NAME = 255  # bytes in the name of a file
# Names in a model_dir, which results of an evaluation must not replace.
_RESERVED_NAME = re.compile(r"best|train|saved_model|damaged|checkpoint|ckpt-.*|.*\.(json|png|npz|lock|log)")


def setting(default: object, help_text: str, *, choices: tuple | None = None, minimum: float | None = None,
            above: float | None = None, maximum: float | None = None, identity: bool = False, network: bool = False,
            length: bool = False, order: bool = False, output: bool = False, data_access: bool = False,
            per_host: bool = False, no_effect: bool = False) -> Any:
    """Returns a field of `Config`: its default, help text, limits and roles. `settings_with` lists settings by role.

    Args:
      default: the value when the flag is not given.
      help_text: what the setting means, with its unit and source.
      choices: the only values allowed.
      minimum: smallest value allowed.
      above: every allowed value is greater than this.
      maximum: largest value allowed.
      identity: role: another value makes it another run. It names the default `model_dir`, and must not change when a
        run is resumed.
      network: role: describes the network, and is inferred from a checkpoint.
      length: role: the length of the training. It may change when a run is resumed; the learning-rate schedule changes
        with it.
      order: role: influences the order of the examples. It must not change when a run is resumed.
      output: role: decides which results are written, and where. Programs that start run.py set it themselves: the grid
        search of `python -m transfer`, and `python -m paper.tables`.
      data_access: role: decides where and how files of a data set are read. `python -m transfer` has a flag of the same
        name.
      per_host: role: may differ among the hosts of a run.
      no_effect: role: has no effect on results, except for the rounding of an accelerator and the order of examples.
    """
    rules = dict(choices=choices, minimum=minimum, above=above, maximum=maximum)
    roles = dict(identity=identity, network=network, length=length, order=order, output=output,
                 data_access=data_access, per_host=per_host, no_effect=no_effect)
    return dataclasses.field(default=default, metadata=dict(help=help_text, roles=roles, **rules))


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of one run, checked. Raises `UserError` when a value or a combination cannot work."""

    # Mode and places.
    mode: str = setting(
        "train",
        "train; eval: wait for checkpoints in --model_dir and evaluate each once, until the last step or "
        "--eval_timeout, or evaluate --checkpoint, unless that is what the run in --model_dir began with; "
        "train_then_eval: train, then evaluate and export the last checkpoint.",
        choices=("train", "eval", "train_then_eval"),
        output=True,
    )
    train_mode: str = setting(
        "pretrain",
        "pretrain: contrastive learning; finetune: training of a checkpoint's encoder on labels, with crops and flips; "
        "supervised: training from scratch on labels, with the augmentation of pretraining and without projection "
        "head.",
        choices=("pretrain", "finetune", "supervised"),
        identity=True,
    )
    model_dir: str | None = setting(
        None,
        "Directory for checkpoints, results, events and exports. Unset: runs/<dataset>_<network>_<hash of the "
        "settings>, so that the same command resumes.",
        output=True, per_host=True,
    )
    data_dir: str | None = setting(None, "Directory of prepared TFDS data sets. Unset: TFDS's own default.",
                                   data_access=True, per_host=True, no_effect=True)
    checkpoint: str | None = setting(
        None,
        "Weights to start from, if model_dir has no checkpoint yet, or to evaluate (--mode=eval): a directory (its "
        "latest), a checkpoint prefix, a SavedModel or a TF Hub handle, of this program or of the original (TF2 or "
        "TF1).",
        identity=True,
    )
    seed: int | None = setting(
        None,
        "Seed of initial weights, order and augmentation. Unset: drawn once, and kept in model_dir/flags.json.",
        minimum=0,
        maximum=2**31 - 1,
        identity=True,
    )

    allow_flag_changes: bool = setting(
        False, "Resume a run although settings differ from those that it was started with.",
        no_effect=True,
    )
    deterministic: bool = setting(
        False,
        "Let TensorFlow use deterministic operations only, so that runs repeat bit by bit on GPUs, too; on CPUs they "
        "do without. May be slower.",
    )

    # Data.
    dataset: str = setting(
        "imagenet2012",
        "A TFDS name, with config if any (imagenet2012_subset/1pct); digits (scikit-learn's 1,797 images, nothing "
        "to download); folder:PATH (images; sub-folders are classes, with or without train/ and test/ above them).",
        identity=True,
    )
    train_split: str = setting(
        "train",
        "Split for training; TFDS slices such as train[:10%] work. In a folder, an image's name decides on which side "
        "of a percentage it is, so that other images do not move it; shares are approximate.",
        identity=True,
    )
    eval_split: str = setting(
        "validation", "Split for evaluation. Unset and absent from the data set: test."
    )
    corrupt_images: str = setting(
        "error",
        "What to do about images in a folder that cannot be read: error names the first of them; skip trains and "
        "evaluates without them. All images are read once before a run begins, and again if some have changed when "
        "it resumes.",
        choices=("error", "skip"),
        data_access=True,
    )
    max_image_pixels: int = setting(
        MAX_IMAGE_PIXELS,
        "Largest image in a folder, width times height in pixels, summed over all frames of a GIF. Larger ones are "
        "treated as --corrupt_images says, without decoding them: decoding takes up to 12 bytes per pixel.",
        minimum=1,
        data_access=True,
    )
    follow_links: bool = setting(False, "Read images that a folder holds as links to places outside of it.",
                                 data_access=True)
    cache_dataset: bool = setting(False, "Cache the encoded examples in memory after the first epoch.",
                                  order=True, no_effect=True)
    shuffle_buffer_mb: int = setting(
        1024,
        "Most memory, in MB per host, for the shuffle buffer of encoded TFDS examples (other data sets are permuted "
        "whole).",
        minimum=1,
        order=True, per_host=True,
    )
    label_fraction: float = setting(
        1.0,
        "Share of the training split whose labels fine-tuning, supervised training, lbfgs and knn may use: as many "
        "examples of every class, as far as there are (paper, B.5); the rest is not used at all. Reads the split once "
        "at start, and keeps the chosen examples, encoded, in memory.",
        above=0, maximum=1, identity=True,
    )
    label_seed: int = setting(0, "Which examples --label_fraction chooses.", minimum=0, identity=True)
    image_size: int = setting(224, "Height and width of the network's input, in pixels.", minimum=8, maximum=4096,
                              identity=True, network=True)

    # Augmentation (paper, Appendix A).
    min_crop_area: float = setting(
        0.08, "Smallest share of an image that a random crop takes, by area; raise it if small crops carry no "
        "information.",
        minimum=1e-4, maximum=1, identity=True,
    )
    random_flip: bool = setting(
        True, "Flip every second view left to right (paper, Appendix A); off where mirror images differ.", identity=True
    )
    augmentation: str = setting(
        "simclr",
        "Augmentation of both views, except in fine-tuning: simclr (crop, flip, colour, blur: paper, Appendix A); "
        "autoaugment (crop, flip, and AutoAugment's policy for ImageNet: Table 1); broader (simclr's, and at times "
        "equalize, solarize, Sobel filtering, motion blur: B.2).",
        choices=("simclr", "autoaugment", "broader"),
        identity=True,
    )
    augment_left: str | None = setting(
        None,
        "In place of --augmentation (paper, Figure 5): both views are the same random crop, and what is named here, "
        f"comma-separated and in order, is applied to the first of them only: {', '.join(AUGMENTATIONS)}. Nothing is "
        "named: the crop as it is.",
        identity=True,
    )
    augment_right: str | None = setting(None, "As --augment_left, for the second view.", identity=True)
    augment_extra: str = setting(
        "",
        "Added to --augmentation (paper, Table 3), comma-separated and in order: rotate (by 0, 90, 180 or 270 degrees) "
        "and, each for half of the views, noise and sobel.",
        identity=True,
    )
    color_jitter_strength: float = setting(
        1.0, "Strength of colour distortion, except in fine-tuning and by --augmentation=autoaugment; 0 leaves it out.",
        minimum=0, maximum=100, identity=True
    )
    brightness: str = setting(
        "multiplicative",
        "Brightness in colour distortion: multiplicative (SimCLR v2, the original's TF2 default) or additive (the "
        "paper's and SimCLR v1's).",
        choices=("multiplicative", "additive"),
        identity=True,
    )
    use_blur: bool = setting(
        True,
        "Gaussian blur of half the views, sigma 0.1 to 2 for each image, by --augmentation=simclr and broader, except "
        "in fine-tuning.",
        identity=True,
    )

    # Network.
    resnet_depth: int = setting(50, "Depth of the ResNet; 10 is for trials on small machines.",
                                choices=tuple(RESNET_DEPTHS), identity=True, network=True)
    width_multiplier: int = setting(1, "Multiplier of the ResNet's width.", minimum=1, maximum=32, identity=True,
                                    network=True)
    sk_ratio: float = setting(
        0.0, "Above 0: selective kernels (SK) with this ratio, and ResNet-D; 0.0625 is usual.",
        minimum=0, maximum=1, identity=True, network=True,
    )
    se_ratio: float = setting(
        0.0, "Above 0: squeeze-and-excitation (SE) with this ratio.", minimum=0, maximum=1, identity=True, network=True
    )
    stem: str = setting(
        "auto",
        "imagenet: 7x7 convolution of stride 2 and max pooling; cifar: 3x3 of stride 1, no pooling (paper, B.9); "
        "auto: cifar up to 32 pixels, as in the original.",
        choices=("auto", "imagenet", "cifar"),
        identity=True,
        network=True,
    )
    batch_norm_decay: float = setting(
        0.9, "Momentum of batch norm's moving statistics.", minimum=0, maximum=1, identity=True
    )
    global_bn: bool = setting(True, "Batch statistics over all replicas rather than each its own.", identity=True)
    proj_head_mode: str = setting(
        "nonlinear", "Projection head g.", choices=("none", "linear", "nonlinear"), identity=True, network=True
    )
    proj_out_dim: int = setting(128, "Output size of the projection head.", minimum=1, maximum=2**16, identity=True,
                                network=True)
    num_proj_layers: int = setting(3, "Layers of the non-linear projection head.", minimum=1, maximum=100,
                                  identity=True, network=True)
    ft_proj_selector: int = setting(
        0,
        "Layer of the projection head that is the input of the linear head: 0 is the output of the encoder, 1 the "
        "first layer of the projection head, -1 its last.",
        identity=True,
    )
    lineareval_while_pretraining: bool = setting(
        True, "Train a linear head on the labels during pretraining, without effect on the encoder.", identity=True,
        network=True,
    )
    fine_tune_after_block: int = setting(
        -1,
        "Fine-tuning trains what comes after this block: -1 everything, 0 all after the stem, 4 the heads only. What "
        "lies before is frozen, batch norm statistics included.",
        minimum=-1,
        maximum=4,
        identity=True,
    )
    zero_init_logits_layer: bool = setting(False, "Start the linear head at zero.", identity=True)

    # Objective and optimisation.
    contrastive_loss: str = setting(
        "nt_xent",
        "Contrastive loss (paper, Table 2): nt_xent; nt_logistic; margin_triplet, which takes --margin in place of "
        "--temperature. The latter two are means over the negatives. Their memory is quadratic in the batch.",
        choices=("nt_xent", "nt_logistic", "margin_triplet"),
        identity=True,
    )
    negatives: str = setting(
        "both",
        "Negatives of a view: both views of all other images, or only their other view (cross_view: all of the paper's "
        "Table 4).",
        choices=("both", "cross_view"),
        identity=True,
    )
    semi_hard: bool = setting(
        False,
        "Of the negatives take only the closest one that is farther than the positive, but by less than --margin "
        "(paper, 5.1).",
        identity=True,
    )
    margin: float | None = setting(
        None,
        f"Margin, in similarity, of margin_triplet and of --semi_hard; unset: {DEFAULT_MARGIN} (paper, B.10: 0, "
        "0.4, 0.8 and 1.6 were tried).",
        minimum=0,
        identity=True,
    )
    temperature: float = setting(
        0.1, "Temperature of the contrastive loss, and of its accuracy and entropy.", above=0, identity=True)
    hidden_norm: bool = setting(True, "l2-normalise the projections in the contrastive loss.", identity=True)
    loss_block_rows: int = setting(
        0,
        "Largest number of rows of similarities that the contrastive loss holds at once, on each replica. 0: all of "
        "them up to 64 MB, above that blocks of 16 MB, but at least 256 rows (on a TPU, all rows of a view). Smaller "
        "blocks take less memory and, below some hundreds of rows, more time; the loss is the same.",
        minimum=0,
    )
    optimizer: str = setting("lars", "Optimizer.", choices=("momentum", "adam", "lars"), identity=True)
    learning_rate: float = setting(
        0.3, "Peak learning rate, per 256 examples (linear scaling) or per square root of the batch (sqrt scaling).",
        minimum=0, identity=True,
    )
    learning_rate_scaling: str = setting(
        "linear",
        "linear: learning_rate * batch / 256; sqrt: learning_rate * sqrt(batch) (paper, B.1).",
        choices=("linear", "sqrt"),
        identity=True,
    )
    linear_head_learning_rate: float | None = setting(
        None,
        "Peak learning rate, per 256 examples and scaled linearly, of a linear head that is trained as if its input "
        "were standardised over the batch: sane at any scale of features; try 0.1. Unset: the encoder's learning rate "
        "on raw features, as in the original, which is unstable on small data sets. The encoder is not affected.",
        above=0,
        identity=True,
    )
    warmup_epochs: float = setting(10.0, "Epochs of linear warm-up.", minimum=0, maximum=10**6, identity=True)
    momentum: float = setting(0.9, "Momentum of LARS and of momentum SGD.", minimum=0, maximum=1, identity=True)
    weight_decay: float = setting(1e-6, "Weight decay.", minimum=0, identity=True)

    # Training.
    train_batch_size: int = setting(512, "Examples a step, over all replicas.", minimum=2, maximum=2**20, identity=True)
    train_epochs: int = setting(100, "Epochs to train.", minimum=1, maximum=10**6, length=True)
    train_steps: int = setting(0, "Steps to train; above 0 it overrides train_epochs.", minimum=0, length=True)
    checkpoint_epochs: int = setting(1, "Epochs between checkpoints.", minimum=1, maximum=10**6, no_effect=True)
    checkpoint_steps: int = setting(
        0, "Steps between checkpoints; above 0 it overrides checkpoint_epochs.", minimum=0, no_effect=True
    )
    keep_checkpoint_max: int = setting(5, "Checkpoints to keep.", minimum=1, no_effect=True)
    keep_best: bool = setting(
        False,
        "Evaluations keep the weights with the best top-1 accuracy of the linear head so far in model_dir/best.",
        no_effect=True,
    )
    keep_hub_module_max: int = setting(1, "SavedModels to keep; 0 keeps all.", minimum=0, no_effect=True)
    log_seconds: float = setting(10.0, "Seconds between progress lines when not on a terminal.", above=0,
                                 per_host=True, no_effect=True)

    micro_batch_size: int = setting(
        0,
        "Examples, over all replicas, whose activations are held at a time; the gradient is still that of the loss "
        "over the whole train_batch_size (Gao et al. 2021). Must divide it. Every image is embedded twice, and batch "
        "norm uses each micro-batch's statistics. 0: the whole batch at once.",
        minimum=0,
        identity=True,
    )
    precision: str = setting(
        "float32",
        "Arithmetic of the network: float32; mixed_bfloat16 (recent CPUs, GPUs and TPUs); mixed_float16 (GPUs; with "
        "loss scaling). Variables, loss, statistics, LARS and the heads' last layers stay in float32, so that "
        "checkpoints fit all three.",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        identity=True,
    )
    profile_steps: int = setting(
        0,
        "Write a TensorBoard profile of this many steps (at most those between two checkpoints), after the first one.",
        minimum=0,
        no_effect=True,
    )

    # Evaluation.
    eval_steps: int = setting(
        0, "Batches to evaluate on; 0 means the whole split, each example once.", minimum=0
    )
    eval_center_crop: bool = setting(
        True,
        "Evaluate images above 32 pixels on the central 87.5 % of their shorter side (224 of 256; paper, B.5), not on "
        "all of it (B.8.1).",
    )
    save_predictions: bool = setting(
        False, "Write labels and logits of the linear head for every example to predictions_<step>.npz, for "
        "`python -m transfer compare`.", no_effect=True
    )
    eval_batch_size: int = setting(256, "Examples an evaluation batch, over all replicas.", minimum=1, maximum=2**20)
    eval_protocol: str = setting(
        "linear_head",
        "What to evaluate, comma-separated: linear_head; lbfgs (logistic regression on the frozen encoder); knn "
        "(cosine, on the frozen encoder); contrastive (the pretraining task on held-out images). Without a linear "
        "head, linear_head is replaced by contrastive and, if there are labels, knn.",
    )
    eval_baselines: bool = setting(
        False, "Also give lbfgs and knn the untrained encoder and the raw pixels, on the same split."
    )
    eval_projections: bool = setting(
        False, "Also give lbfgs and knn the projections z = g(h) in place of h (paper, Figure 8 and 4.2)."
    )
    eval_name: str | None = setting(None, "Sub-folder of model_dir for the results of this evaluation.", output=True)
    eval_timeout: float = setting(
        0.0, "--mode=eval gives up after this many seconds without a new checkpoint; 0 waits for ever.", minimum=0,
        no_effect=True,
    )

    # Hardware.
    use_tpu: bool = setting(False, "Run on a TPU.", no_effect=True)
    tpu_name: str | None = setting(None, "Cloud TPU name or grpc://address:8470; needs --use_tpu.", no_effect=True)
    tpu_zone: str | None = setting(None, "Zone of the Cloud TPU, if not found by itself.", no_effect=True)
    gcp_project: str | None = setting(None, "Project of the Cloud TPU, if not found by itself.", no_effect=True)
    master: str | None = setting(None, "Another spelling of --tpu_name, kept from the original.", no_effect=True)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _check_value(field, getattr(self, field.name))
        for name, check in (("model_dir", check_path), ("checkpoint", check_weights_path),
                            ("data_dir", functools.partial(check_path, allow_patterns=True))):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check(name, getattr(self, name)))
        _check_combinations(self)

    # What follows from the settings.

    @property
    def pretraining(self) -> bool:
        """Whether this run trains the contrastive task."""
        return self.train_mode == "pretrain"

    @property
    def uses_pretraining_augmentation(self) -> bool:
        """Whether views get more than a crop and a flip: colour distortion and blur."""
        return self.train_mode != "finetune"

    @property
    def center_crop_eval(self) -> bool:
        """Whether evaluations take the centre of images rather than all of the shorter side."""
        return self.eval_center_crop and self.image_size > 32

    @property
    def branch_operators(self) -> tuple[tuple[str, ...], ...] | None:
        """The operators of the first and of the second view, by name; None: --augmentation does for both."""
        if self.augment_left is None and self.augment_right is None:
            return None
        return tuple(_names(text) for text in (self.augment_left or "", self.augment_right or ""))

    @property
    def extra_augmentations(self) -> tuple[str, ...]:
        """The names in `augment_extra`, in order."""
        return _names(self.augment_extra)

    @property
    def blurs_views(self) -> bool:
        """Whether views are blurred on the device."""
        return (self.use_blur and self.uses_pretraining_augmentation and self.augmentation != "autoaugment"
                and self.branch_operators is None)

    @property
    def effective_proj_head_mode(self) -> str:
        """The projection head that the model has: none in supervised training."""
        return "none" if self.train_mode == "supervised" else self.proj_head_mode

    @property
    def effective_num_proj_layers(self) -> int:
        """Layers of the projection head that the model has."""
        return {"none": 0, "linear": 1, "nonlinear": self.num_proj_layers}[self.effective_proj_head_mode]

    @property
    def linear_head_on_projections(self) -> bool:
        """Whether the input of the linear head is a layer of the projection head, not the encoder."""
        return self.has_linear_head and self.ft_proj_selector % (self.effective_num_proj_layers + 1) > 0

    @property
    def has_linear_head(self) -> bool:
        """Whether the model has a supervised head."""
        return not self.pretraining or self.lineareval_while_pretraining

    @property
    def effective_margin(self) -> float | None:
        """The margin of the contrastive loss, or None if it has none."""
        if self.contrastive_loss != "margin_triplet" and not self.semi_hard:
            return None
        return DEFAULT_MARGIN if self.margin is None else self.margin

    @property
    def cifar_stem(self) -> bool:
        """Whether the stem is the 3x3 one without pooling."""
        return self.image_size <= 32 if self.stem == "auto" else self.stem == "cifar"

    @property
    def eval_protocols(self) -> tuple[str, ...]:
        """The names in `eval_protocol`, in order."""
        return _names(self.eval_protocol)

    @property
    def tpu_address(self) -> str | None:
        """The TPU's name or address, from either flag."""
        return self.tpu_name or self.master

    @property
    def network_name(self) -> str:
        """A short name such as resnet50_2x_sk."""
        marks = [f"_{self.width_multiplier}x"] if self.width_multiplier > 1 else []
        marks += ["_sk"] if self.sk_ratio > 0 else []
        marks += ["_se"] if self.se_ratio > 0 else []
        return f"resnet{self.resnet_depth}" + "".join(marks)

    def identity(self) -> dict:
        """Returns the settings with the role `identity` that differ from their defaults, by name."""
        values = {name: getattr(self, name) for name in settings_with("identity")}
        return {name: value for name, value in values.items() if value != getattr(Config, name)}

    def default_model_dir(self) -> str:
        """runs/<dataset>_<network>_<hash of `identity`>: the same command finds its own run again."""
        digest = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]
        name = slug(self.dataset.strip("/").rsplit(":", 1)[-1])
        return f"runs/{name.strip('_')[-40:]}_{self.network_name}_{digest}"

    def replace(self, **changes: Any) -> Config:
        """A copy with some settings changed, checked again."""
        return dataclasses.replace(self, **changes)


def settings_with(*roles: str) -> tuple[str, ...]:
    """Returns the names of the settings that have at least one of the roles of `setting`, in order of definition.

    Raises `KeyError` for an unknown role.
    """
    return tuple(field.name for field in dataclasses.fields(Config)
                 if any(field.metadata["roles"][role] for role in roles))


def _names(text):
    """What stands between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _check_value(field, value):
    """One setting against its own rules."""
    if value is None:
        if field.default is None:
            return
        raise UserError(f"--{field.name} needs a value, such as its default {field.default}")
    rules = field.metadata
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--{field.name}={value} is not a finite number: its default is {field.default}")
    if isinstance(value, float) and value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise UserError(f"--{field.name}={value} is outside the range of float32: use 0, or a magnitude from "
                        f"{_SMALLEST:g} to {_LARGEST:g} (default {field.default})")
    if isinstance(value, int) and abs(value) > _INT32:
        raise UserError(f"--{field.name}={value} does not fit into 32 bits: use at most {_INT32} (default "
                        f"{field.default})")
    if rules["choices"] and value not in rules["choices"]:
        allowed = ", ".join(str(choice) for choice in rules["choices"])
        raise UserError(f"--{field.name}={value} is not known: choose one of {allowed}")
    for rule, broken in (("minimum", lambda b: value < b), ("above", lambda b: value <= b),
                         ("maximum", lambda b: value > b)):
        if rules[rule] is not None and broken(rules[rule]):
            words = {"minimum": "at least", "above": "above", "maximum": "at most"}[rule]
            raise UserError(f"--{field.name}={value} must be {words} {rules[rule]} (default {field.default})")


def _check_combinations(config):
    """Settings that contradict each other."""
    if config.train_mode != "finetune" and config.fine_tune_after_block > -1:
        raise UserError("--fine_tune_after_block is for --train_mode=finetune: leave it at -1 otherwise")
    if config.pretraining and config.label_fraction < 1 and config.mode != "eval":
        raise UserError("--label_fraction is for --train_mode=finetune and supervised, and for --mode=eval: to "
                        "pretrain on less, give a slice such as --train_split='train[:10%]'")
    if config.train_mode == "supervised" and config.checkpoint and config.mode != "eval":
        raise UserError("--train_mode=supervised begins from scratch: leave --checkpoint out, or use "
                        "--train_mode=finetune")
    if config.label_seed and config.label_fraction == 1:
        raise UserError("--label_seed chooses among the labels: give --label_fraction below 1, or leave it out")
    layers = config.effective_num_proj_layers
    if not -(layers + 1) <= config.ft_proj_selector <= layers:
        raise UserError(
            f"--ft_proj_selector={config.ft_proj_selector} names no layer: the projection head ("
            f"{config.effective_proj_head_mode}) has {layers}; use {-layers - 1} to {layers}"
        )
    if config.linear_head_learning_rate is not None:
        _check_linear_head(config)
    _check_loss(config)
    _check_augmentation(config)
    if config.micro_batch_size and config.train_batch_size % config.micro_batch_size:
        raise UserError(f"--micro_batch_size={config.micro_batch_size} does not divide --train_batch_size="
                        f"{config.train_batch_size}: use {_largest_divisor(config)}")
    if config.zero_init_logits_layer and not config.has_linear_head:
        raise UserError("--zero_init_logits_layer needs a linear head: set --lineareval_while_pretraining")
    unknown = [name for name in config.eval_protocols if name not in EVAL_PROTOCOLS]
    if unknown or not config.eval_protocols:
        raise UserError(f"--eval_protocol={config.eval_protocol} is not known: use {', '.join(EVAL_PROTOCOLS)}")
    if not config.pretraining and "contrastive" in config.eval_protocols:
        raise UserError("--eval_protocol=contrastive is for --train_mode=pretrain: use linear_head, lbfgs or knn")
    if config.save_predictions and not (config.mode != "train" and config.has_linear_head
                                        and "linear_head" in config.eval_protocols):
        raise UserError("--save_predictions is for evaluations of a linear head: use --mode=train_then_eval or eval, "
                        "and --eval_protocol=linear_head")
    if config.keep_best and config.mode == "train":
        raise UserError("--keep_best is for evaluations: use --mode=train_then_eval, or --mode=eval beside it")
    if config.keep_best and not (config.has_linear_head and "linear_head" in config.eval_protocols):
        raise UserError("--keep_best goes by the linear head's accuracy: evaluate one by --eval_protocol=linear_head")
    for name in ("eval_baselines", "eval_projections"):
        if getattr(config, name) and not {"lbfgs", "knn"} & set(config.eval_protocols):
            raise UserError(f"--{name} needs --eval_protocol=lbfgs or knn")
    if config.eval_projections and not config.effective_num_proj_layers:
        raise UserError("--eval_projections needs a projection head: leave it out")
    if config.eval_name and _RESERVED_NAME.fullmatch(config.eval_name):
        raise UserError(f"--eval_name={config.eval_name}: files of the run have this name. Use another name.")
    if config.eval_name and (check_path("eval_name", config.eval_name).startswith((".", "/", "~"))
                             or "/" in config.eval_name or len(os.fsencode(config.eval_name)) > _LONGEST_NAME):
        raise UserError(f"--eval_name={config.eval_name}: this is not the name of one directory in --model_dir. Use a "
                        f"name of up to {_LONGEST_NAME} bytes without /, and without . or ~ at the start.")
    _check_tpu(config)


def _check_augmentation(config):
    """Names of operators, and what stands in place of what."""
    extra = config.extra_augmentations
    unknown = [name for name in extra if name not in EXTRA_AUGMENTATIONS]
    if unknown:
        raise UserError(f"--augment_extra={config.augment_extra}: {unknown[0]} is not known: use "
                        f"{', '.join(EXTRA_AUGMENTATIONS)}")
    for flag, given in (("augment_extra", extra), ("augmentation", config.augmentation != "simclr")):
        if given and not config.uses_pretraining_augmentation:
            raise UserError(f"--{flag} is not for --train_mode=finetune, which crops and flips alone: leave it out")
    if config.branch_operators is None:
        return
    if extra:
        raise UserError("--augment_extra is for both views: with --augment_left or --augment_right, name it there")
    for flag, names in zip(("augment_left", "augment_right"), config.branch_operators):
        unknown = [name for name in names if name not in AUGMENTATIONS]
        if unknown:
            raise UserError(f"--{flag}={getattr(config, flag)}: {unknown[0]} is not known: use "
                            f"{', '.join(AUGMENTATIONS)}")
        if {"color", "jitter"} & set(names) and config.color_jitter_strength == 0:
            raise UserError(f"--{flag}={getattr(config, flag)} distorts nothing with --color_jitter_strength=0: raise "
                            "it")
    if not config.pretraining:
        raise UserError("--augment_left and --augment_right are for --train_mode=pretrain, which has two views: leave "
                        "them out")
    if config.augmentation != "simclr":
        raise UserError(f"--augmentation={config.augmentation} and --augment_left or --augment_right exclude each "
                        "other: leave one of them out")


def _check_loss(config):
    """What belongs to which contrastive loss."""
    for name, usual in (("contrastive_loss", "nt_xent"), ("negatives", "both"), ("semi_hard", False), ("margin", None)):
        if getattr(config, name) != usual and not config.pretraining:
            raise UserError(f"--{name} is for --train_mode=pretrain, which has a contrastive loss: leave it out")
    if config.semi_hard and config.contrastive_loss == "nt_xent":
        raise UserError("--semi_hard is for --contrastive_loss=nt_logistic and margin_triplet: leave it out, nt_xent "
                        "weighs negatives by their hardness")
    if config.margin is not None and config.effective_margin is None:
        raise UserError(f"--margin={config.margin} is for --contrastive_loss=margin_triplet and for --semi_hard: leave "
                        "it out")
    if config.semi_hard and config.margin == 0:
        raise UserError("--margin=0 leaves --semi_hard no negatives: raise it")
    if config.loss_block_rows and (config.contrastive_loss != "nt_xent" or config.negatives != "both"):
        raise UserError("--loss_block_rows is for --contrastive_loss=nt_xent with --negatives=both: leave it out")


def _largest_divisor(config):
    """The largest size of micro-batches that is allowed, up to the one that was given."""
    return next(size for size in range(min(config.micro_batch_size, config.train_batch_size), 0, -1)
                if config.train_batch_size % size == 0)


def _check_linear_head(config):
    """Checks where --linear_head_learning_rate is supported."""
    flag = "--linear_head_learning_rate"
    if not (config.pretraining and config.has_linear_head):
        raise UserError(f"{flag} is for the linear head beside the pretraining: leave it out")
    if config.optimizer == "adam":
        raise UserError(f"{flag} has no meaning for --optimizer=adam, which ignores the gradient's scale: leave it out")
    if config.learning_rate == 0:
        raise UserError(f"{flag} needs --learning_rate above 0: the two share warm-up and decay")


def _check_tpu(config):
    """The TPU's flags stand together."""
    for name in ("tpu_name", "tpu_zone", "gcp_project", "master"):
        if getattr(config, name) and not config.use_tpu:
            raise UserError(f"--{name} is for TPUs: add --use_tpu, or leave it out")
    if config.use_tpu and config.precision == "mixed_float16":
        raise UserError("--precision=mixed_float16 is not for TPUs: use mixed_bfloat16")
    if config.use_tpu and config.micro_batch_size:
        raise UserError("--micro_batch_size is not for TPUs: leave it out, and use more cores for larger batches")
    if config.tpu_name and config.master and config.tpu_name != config.master:
        raise UserError("--tpu_name and --master name two TPUs: give one")


def select_settings(content: dict) -> dict | None:
    """Returns the entries of a dict that are settings, or None if one of them has a value of another type."""
    types = typing.get_type_hints(Config)
    found = {name: value for name, value in content.items() if name in types}
    for name, value in found.items():
        kinds = typing.get_args(types[name]) or (types[name],)
        # Whole numbers are written without a decimal point; bool is a subclass of int.
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            return None
    return found


_DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, bool: flags.DEFINE_bool, str: flags.DEFINE_string}


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines one absl flag for each field of `Config`."""
    types = typing.get_type_hints(Config)
    for field in dataclasses.fields(Config):
        kinds = [kind for kind in typing.get_args(types[field.name]) or (types[field.name],) if kind is not type(None)]
        if field.metadata["choices"] and kinds == [str]:
            flags.DEFINE_enum(field.name, field.default, field.metadata["choices"], field.metadata["help"],
                              flag_values=flag_values)
        else:
            _DEFINE[kinds[0]](field.name, field.default, field.metadata["help"], flag_values=flag_values)


def from_arguments(arguments: list[str], flag: str = "--flags") -> Config:
    """The `Config` of arguments as on the command line of run.py. Raises `UserError`, which names `flag`."""
    return from_flags(_parse(arguments, flag))


def parse_settings(text: str, flag: str = "--flags") -> dict:
    """The settings that a text gives, as on the command line of run.py, quoted as in a shell: dict: name -> value.

    Raises `UserError`, which names `flag`.
    """
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{flag}={text}: {first_line(error)}") from error
    values = _parse(arguments, flag)
    return {field.name: values[field.name].value for field in dataclasses.fields(Config) if values[field.name].present}


def _parse(arguments, flag):
    values = flags.FlagValues()
    define_flags(values)
    try:
        rest = values(["run.py", *arguments])
    except flags.Error as error:
        raise UserError(f"{flag}: {first_line(error)}") from error
    if rest[1:]:
        raise UserError(f"{flag}: {rest[1]} is not a flag: settings are written --name=value")
    return values


def from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> Config:
    """The `Config` that the parsed flags say. Raises `UserError`."""
    return Config(**{field.name: flag_values[field.name].value for field in dataclasses.fields(Config)})
