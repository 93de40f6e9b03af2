"""Models of many shapes with random weights, for bench_models.py, and the process that loads what was
exported of them: it never has atoll. Each case names the packages that it needs.

    python _models.py RESULTS CASE=LINE ...    builds CASE anew, of another seed, runs LINE, writes
                                               its outputs (and what went wrong) to RESULTS
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

# Not spelled out: bandit takes a number behind a key with "token" in it for a password.
SPECIAL = (("pad", 0), ("bos", 1), ("eos", 2), ("decoder_start", 1))
TOKENS = {f"{kind}_token_id": number for kind, number in SPECIAL}
SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    **TOKENS,
}
EXPERTS = {"num_experts_per_tok": 1, "num_key_value_heads": 2, "head_dim": 8}
ENCODER_DECODER = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    **TOKENS,
}
GPT2 = {
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    **TOKENS,
}
NORMS = ["conv1.1", "conv1.4", "bn1", "bn2", "downsample.2"]
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32}


@dataclass(frozen=True)
class Case:
    """A model and a batch for it. ``fresh``: the model that the line is typed beside, where that is
    another than the one that is trained. ``refused``: a word of what `attach` says, "" where it takes the
    model. ``needs``: a package.
    """

    build: Callable[[], Any]
    batch: Callable[[], Any]
    call: Callable[[Any, Any], Any] = lambda model, batch: model(batch)
    needs: str = ""
    refused: str = ""
    fresh: Callable[[], Any] | None = None


def output(case: Case, model: Any, seed: int = 11) -> Tensor:
    """The floating outputs of a model on a batch of its case, in one row."""
    torch.manual_seed(seed)
    found = case.call(model, case.batch())
    found = getattr(found, "logits", found)
    found = found if isinstance(found, list | tuple) else [found]
    parts = [
        torch.view_as_real(each) if each.is_complex() else each
        for each in found
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
    ]
    return torch.cat([each.float().reshape(-1) for each in parts])


# ---- batches


def rows(*sides: int) -> Callable[[], Tensor]:
    """Normal values."""
    return lambda: torch.randn(sides)


def ids() -> Tensor:
    """Two texts of seven tokens of 32."""
    return torch.randint(3, 32, (2, 7))


def text(model: Any, batch: Tensor) -> Any:
    """Of encoder and decoder both, where there are two."""
    if getattr(model.config, "is_encoder_decoder", False):
        return model(input_ids=batch, decoder_input_ids=batch)
    return model(input_ids=batch)


def load(name: str) -> Any:
    """A module that is loaded where a case needs it, and perhaps not installed."""
    return import_module(name)


# ---- models of one's own


class Codebook(nn.Module):
    """A VQ layer whose codebook is an average, in buffers; and what counts its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)
        self.codes: Tensor
        self.uses: Tensor
        self.begun: Tensor
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("uses", torch.zeros(8, dtype=torch.int64))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to the same."""
        z = self.encode(x)
        at = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.begun.fill_(True)
                self.uses += torch.bincount(at, minlength=8)
                self.codes[at] = torch.lerp(self.codes[at], z, 0.1)
        return self.decode(z + (self.codes[at] - z).detach())


class Complex(nn.Module):
    """A buffer of complex numbers: a Fourier filter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.filter: Tensor
        self.register_buffer("filter", torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to the same."""
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter * self.scale, n=6)


class ComplexWeights(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to the same."""
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6)


class TwoTypes(nn.Module):
    """A body in bfloat16 and a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).to(torch.bfloat16)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to (rows, 3)."""
        return self.head(self.body(x.to(torch.bfloat16)).float())


class Recurrent(nn.Module):
    """An LSTM with projections whose weights cuDNN wants in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, bidirectional=True, proj_size=4)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(time, rows, 6) to (time, rows, 3)."""
        return self.head(self.lstm(x)[0])


class Odd(nn.Module):
    """Lists and dicts of parameters, a scalar, an empty one, one module at two places, a transposed
    weight, a mask, a buffer that is a view of another, and one that is None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.several = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(2)])
        self.named = nn.ParameterDict({"a b": nn.Parameter(torch.randn(6)).requires_grad_(False)})
        self.turned = nn.Parameter(torch.randn(6, 6).t())
        self.first = self.second = nn.Linear(6, 6)
        self.mask: Tensor
        self.whole: Tensor
        self.part: Tensor
        self.register_buffer("mask", torch.rand(6) > 0.3)
        self.register_buffer("whole", torch.randn(4, 6))
        self.register_buffer("part", self.whole[1])
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to the same."""
        x = x * self.several[0] + self.several[1] + self.named["a b"]
        x = torch.where(self.mask, self.scale * x, self.part)
        return self.second(torch.tanh(self.first(x @ self.turned)))


class Reparametrised(nn.Module):
    """Weight norm and spectral norm by hooks, as torch had them first, and an orthogonal weight."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.first = nn.utils.weight_norm(nn.Linear(6, 8))
        self.second = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.last = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to (rows, 8)."""
        return self.last(torch.tanh(self.second(self.first(x))))


class Averaging(nn.Module):
    """A teacher that follows the student, in the same module: frozen parameters that change."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) to (rows, 12)."""
        if self.training:
            with torch.no_grad():
                for mine, its in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    mine.lerp_(its, 0.1)
        return torch.cat([self.student(x), self.teacher(x)], 1)


def norms() -> nn.Module:
    """Weight norm and spectral norm as parametrizations; batch norm after them."""
    named = nn.utils.parametrizations
    return nn.Sequential(
        named.weight_norm(nn.Linear(6, 8)),
        nn.BatchNorm1d(8),
        named.spectral_norm(nn.Linear(8, 3)),
    )


def pruned() -> nn.Module:
    """Weights with masks in buffers."""
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def quantised() -> nn.Module:
    """Observers of quantisation-aware training, whose ranges are learnt in forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = load("torch.ao.quantization")
        model = nn.Sequential(
            quantization.QuantStub(),
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 3),
            quantization.DeQuantStub(),
        )
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        model = quantization.fuse_modules_qat(model, [["1", "2", "3"]])
        return quantization.prepare_qat(model.train())


def frozen_trunk() -> nn.Module:
    """A trunk whose parameters are frozen and whose running statistics are not."""
    trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(trunk.requires_grad_(False), nn.Linear(64, 3))


def lazy(batch: Tensor | None = None) -> nn.Module:
    """Lazy modules, after a first batch or before."""
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    if batch is not None:
        model(batch)
    return model


def compiled() -> nn.Module:
    """A compiled model, whose ``state_dict()`` has names of its own; not traced here."""
    torch._dynamo.config.disable = True
    return torch.compile(norms())  # type: ignore[return-value]


# ---- models of libraries


def timm(name: str, **settings: Any) -> Callable[[], Any]:
    """One of timm's, with random weights."""

    def build() -> Any:
        return load("timm").create_model(name, num_classes=5, **settings)

    return build


def split_batches() -> Any:
    """Timm's batch norm that has one more for adversarial halves."""
    model = load("timm").create_model("resnet10t", num_classes=5)
    return load("timm.layers").convert_splitbn_model(model, 2)


def library(config: str, kind: str, dtype: Any = None, **settings: Any) -> Any:
    """One of transformers', with random weights."""

    def build() -> Any:
        import transformers

        made = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return made if dtype is None else made.to(dtype)

    return build


def llama(**settings: Any) -> Any:
    """A Llama."""
    return library("LlamaConfig", "LlamaForCausalLM", **SMALL, num_key_value_heads=2, **settings)


def mixed_llama() -> Any:
    """In bfloat16, its head in float32."""
    model = llama()().to(torch.bfloat16)
    model.lm_head.float()
    return model


def pair() -> Any:
    """An encoder and a decoder of two configurations."""
    import transformers

    small: dict[str, Any] = {**SMALL, "max_position_embeddings": 16}
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**small), transformers.BertConfig(**small)
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.EncoderDecoderModel(config)


def own_class() -> Any:
    """A class of one's own over the library's model."""
    import transformers

    class Classifier(transformers.BertPreTrainedModel):
        """Its head is not the library's."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.bert = transformers.BertModel(config)
            self.head = nn.Linear(config.hidden_size, 3)
            self.post_init()

        def forward(self, batch: Tensor) -> Tensor:
            """Tokens to three logits each."""
            return self.head(self.bert(input_ids=batch).last_hidden_state)

    return Classifier(transformers.BertConfig(**SMALL, max_position_embeddings=16))


def adapter(
    build: Callable[[], Any], batch: Callable[[], Any], call: Any = None, **settings: Any
) -> Case:
    """A LoRA on a base of one seed."""
    base = same(build)

    def adapted() -> Any:
        peft = load("peft")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model(base(), peft.LoraConfig(r=2, **settings))

    return Case(adapted, batch, call or (lambda model, x: model(x)), needs="peft", fresh=base)


def same(build: Callable[[], Any]) -> Callable[[], Any]:
    """The same weights in every process, as of a checkpoint."""

    def seeded() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return build()

    return seeded


IMAGE = rows(2, 3, 32, 32)
ROWS = rows(4, 6)
WAV2VEC = {
    **{name: value for name, value in SMALL.items() if "_id" not in name},
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}
ENCODEC = {
    "num_filters": 4,
    "hidden_size": 8,
    "codebook_dim": 8,
    "codebook_size": 16,
    "upsampling_ratios": [4, 2],
    "num_lstm_layers": 1,
    "target_bandwidths": [6.0],
}

CASES: dict[str, Case] = {
    # of one's own
    "norms": Case(norms, ROWS),
    "norms_by_hooks": Case(Reparametrised, ROWS),
    "codebook": Case(Codebook, ROWS),
    "complex_buffer": Case(Complex, ROWS),
    "complex_weights": Case(ComplexWeights, ROWS, refused="complex64"),
    "two_types": Case(TwoTypes, ROWS),
    "float64": Case(lambda: norms().double(), lambda: ROWS().double()),
    "lstm": Case(Recurrent, rows(5, 4, 6)),
    "odd": Case(Odd, ROWS),
    "teacher": Case(Averaging, ROWS),
    "pruned": Case(pruned, ROWS),
    "quantised": Case(quantised, rows(2, 1, 6, 6)),
    "frozen_trunk": Case(frozen_trunk, rows(2, 1, 6, 6)),
    "lazy": Case(lazy, ROWS, refused="lazy"),
    "lazy_made": Case(lambda: lazy(ROWS()), ROWS),
    "compiled": Case(compiled, ROWS, fresh=norms),
    "channels_last": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(  # pyright: ignore[reportCallIssue]
            memory_format=torch.channels_last
        ),
        IMAGE,
    ),
    "meta": Case(lambda: nn.Linear(6, 3, device="meta"), ROWS, refused="meta"),
    # timm
    "resnet": Case(timm("resnet10t"), IMAGE, needs="timm"),
    "mobilenet": Case(timm("mobilenetv3_small_050"), IMAGE, needs="timm"),
    "split_batches": Case(split_batches, rows(4, 3, 64, 64), needs="timm"),
    "vit": Case(
        timm("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2), IMAGE, needs="timm"
    ),
    "swin": Case(
        timm(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=12,
            depths=(1, 1),
            num_heads=(1, 2),
        ),
        IMAGE,
        needs="timm",
    ),
    "levit": Case(timm("levit_128s", img_size=64), rows(2, 3, 64, 64), needs="timm"),
    "eva": Case(
        timm("eva02_tiny_patch14_224", img_size=28, embed_dim=24, depth=2, num_heads=2),
        rows(2, 3, 28, 28),
        needs="timm",
    ),
    "standardised": Case(timm("nf_resnet26"), IMAGE, needs="timm"),
    "vit_adapter": adapter(
        timm("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2),
        IMAGE,
        target_modules=["qkv"],
        modules_to_save=["head"],
    ),
    "resnet_adapter": adapter(
        timm("resnet10t"),
        IMAGE,
        target_modules=r"layer\d\.0\.conv\d",
        modules_to_save=["fc", *NORMS],
    ),
    "resnet_adapter_alone": replace(
        adapter(timm("resnet10t"), IMAGE, target_modules=r"layer\d\.0\.conv\d"),
        refused="running_mean",
    ),
    # transformers
    "gpt2": Case(library("GPT2Config", "GPT2LMHeadModel", **GPT2), ids, text, needs="transformers"),
    "gpt2_adapter": adapter(
        library("GPT2Config", "GPT2LMHeadModel", **GPT2),
        ids,
        text,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    ),
    "bert": Case(
        library("BertConfig", "BertForMaskedLM", **SMALL, max_position_embeddings=16),
        ids,
        text,
        needs="transformers",
    ),
    "own_class": Case(own_class, ids, needs="transformers"),
    "encoder_decoder": Case(pair, ids, text, needs="transformers"),
    "t5": Case(
        library(
            "T5Config", "T5ForConditionalGeneration", **T5, pad_token_id=0, decoder_start_token_id=0
        ),
        ids,
        text,
        needs="transformers",
    ),
    "switch": Case(
        library(
            "SwitchTransformersConfig",
            "SwitchTransformersForConditionalGeneration",
            **T5,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_experts=4,
            router_jitter_noise=0.0,
            pad_token_id=0,
            decoder_start_token_id=0,
        ),
        ids,
        text,
        needs="transformers",
    ),
    "bart": Case(
        library("BartConfig", "BartForConditionalGeneration", **ENCODER_DECODER),
        ids,
        text,
        needs="transformers",
    ),
    "whisper": Case(
        library(
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            **ENCODER_DECODER,
            max_source_positions=16,
            max_target_positions=16,
            num_mel_bins=8,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        rows(2, 8, 32),
        lambda model, batch: model(
            input_features=batch, decoder_input_ids=torch.ones(2, 3, dtype=torch.int64)
        ),
        needs="transformers",
    ),
    "mixtral": Case(
        library("MixtralConfig", "MixtralForCausalLM", **SMALL, **EXPERTS, num_local_experts=8),
        ids,
        text,
        needs="transformers",
    ),
    "qwen_experts": Case(
        library(
            "Qwen3MoeConfig",
            "Qwen3MoeForCausalLM",
            **SMALL,
            **EXPERTS,
            num_experts=8,
            moe_intermediate_size=8,
        ),
        ids,
        text,
        needs="transformers",
    ),
    "deepseek": Case(
        library(
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            **SMALL,
            num_key_value_heads=2,
            n_routed_experts=8,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            first_k_dense_replace=1,
        ),
        ids,
        text,
        needs="transformers",
    ),
    "mamba": Case(
        library(
            "MambaConfig",
            "MambaForCausalLM",
            vocab_size=32,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        ids,
        text,
        needs="transformers",
    ),
    "wav2vec": Case(
        library("Wav2Vec2Config", "Wav2Vec2ForCTC", **WAV2VEC, pad_token_id=0),
        rows(2, 400),
        lambda model, batch: model(input_values=batch),
        needs="transformers",
    ),
    "clip": Case(
        library(
            "CLIPConfig",
            "CLIPModel",
            text_config={**SMALL, "max_position_embeddings": 16, "projection_dim": 8},
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 16,
            },
            projection_dim=8,
        ),
        lambda: (torch.randint(3, 32, (2, 7)), torch.randn(2, 3, 32, 32)),
        lambda model, batch: model(input_ids=batch[0], pixel_values=batch[1]).logits_per_image,
        needs="transformers",
    ),
    "encodec": Case(
        library("EncodecConfig", "EncodecModel", **ENCODEC),
        rows(1, 1, 320),
        lambda model, batch: model.decoder(model.encoder(batch)),
        needs="transformers",
    ),
    "masked_autoencoder": Case(
        library(
            "ViTMAEConfig",
            "ViTMAEForPreTraining",
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=32,
            patch_size=16,
            decoder_hidden_size=16,
            decoder_intermediate_size=16,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
        ),
        IMAGE,
        lambda model, batch: model(pixel_values=batch, noise=torch.rand(2, 4)).logits,
        needs="transformers",
    ),
    "llama_bf16": Case(lambda: llama()().to(torch.bfloat16), ids, text, needs="transformers"),
    "llama_long": Case(
        llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}),
        ids,
        text,
        needs="transformers",
    ),
    "llama_two_types": Case(
        mixed_llama,
        ids,
        lambda model, batch: model.lm_head(model.model(batch).last_hidden_state.float()),
        needs="transformers",
    ),
}


def ready(case: Case) -> bool:
    """Whether this machine has the package that it needs."""
    return not case.needs or find_spec(case.needs) is not None


def main() -> None:
    """See the module's docstring."""
    from safetensors.torch import save_file

    sys.modules["atoll"] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results, wrong = dict[str, Tensor](), dict[str, str]()
    for argument in sys.argv[2:]:
        name, line = argument.split("=", 1)
        case = CASES[name]
        torch.manual_seed(99)
        names: dict[str, Any] = {"model": (case.fresh or case.build)()}
        try:
            RUN(compile(line, name, "single"), names)
            with torch.no_grad():
                results[name] = output(case, names["model"].eval())
        except Exception as error:  # of a line that does not do what it says
            wrong[name] = f"{type(error).__name__}: {error}"
    save_file(results, sys.argv[1], {"wrong": json.dumps(wrong)})


RUN: Any = __builtins__["exec"] if isinstance(__builtins__, dict) else __builtins__.exec

if __name__ == "__main__":
    main()
