"""What a folder of someone else's may ask of the libraries that build its networks."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from heron.base.dotted import TRUST
from heron.base.errors import ConfigError

# What a network is built with that a folder of someone else's describes: numbers and words alone.
_TIMM_OPTIONS = """
    aa_layer act_layer always_partition avg_down base_width block_config block_reduce_first bn_eps
    bn_momentum bn_size cardinality channels class_token conv_bias conv_layer conv_mlp depth depths
    dims down_kernel_size dynamic_img_pad dynamic_img_size embed_dim embed_dims expand_ratio fc_norm
    final_norm fix_init fix_stem global_pool growth_rate head_bias head_dim head_hidden_size
    head_init_scale head_norm head_norm_first heads img_size in_chans init_values kernel_sizes
    layers ls_init_value mlp_ratio mlp_ratios no_embed_class norm_eps norm_layer num_classes
    num_features num_heads num_kv_heads num_reg_tokens output_stride pad_type patch_size
    pool_include_prefix pos_embed pre_norm proj_bias qk_norm qkv_bias qkv_fused reg_tokens
    replace_stem_pool scale_attn_norm scale_mlp scale_mlp_norm sr_ratios stages stem_kernel_size
    stem_size stem_type stem_width strict_img_size swiglu_mlp use_abs_pos_emb use_fc_norm use_grn
    use_rel_pos_bias use_rot_pos_emb use_shared_rel_pos_bias weight_init window_size window_sizes
    zero_init_last
"""

INITIAL = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict",
           "checkpoint_path", "cache_dir"}  # timm's, of initial weights  # fmt: skip

# Of transformers: they have no network of another library in them, and load no kernel by name.
_NETWORKS = """
    albert beit bert bert-generation big_bird bit bloom camembert canine clip_text_model
    clip_vision_model convbert convnext convnextv2 cvt data2vec-text data2vec-vision deberta
    deberta-v2 deit dinov2 dinov2_with_registers dinov3_convnext dinov3_vit distilbert efficientnet
    electra ernie esm eurobert falcon flaubert fnet focalnet funnel gemma gemma2 gpt2 gpt_neo
    gpt_neox gptj gte hgnet_v2 hiera ibert ijepa imagegpt layoutlm levit llama longformer
    megatron-bert mistral mobilebert mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 modernbert
    mpnet nomic_bert nystromformer olmo olmo2 opt phi phi3 poolformer pvt pvt_v2 qwen2 qwen3 regnet
    rembert resnet roberta roberta-prelayernorm roformer segformer siglip2_vision_model
    siglip_vision_model smollm3 splinter squeezebert swiftformer swin swinv2 vit vit_mae vit_msn
    vitdet xlm xlm-roberta xlm-roberta-xl xlnet yolos
"""

EARLIER = {  # keys that configurations no longer have, and that still count
    "dtype", "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "n_embed",
    "partial_rotary_factor", "pooler_hidden_size", "rope_scaling", "rope_theta", "rotary_emb_base",
    "rotary_pct", "torch_dtype",
}  # fmt: skip

WORD = re.compile(r"[\w.+-]{0,64}")

TIMM_OPTIONS, NETWORKS = frozenset(_TIMM_OPTIONS.split()), frozenset(_NETWORKS.split())


def timm_options(name: str, options: Mapping[str, Any], key: str, remedy: str = TRUST) -> None:
    """Raises ConfigError for a model of timm that a folder may not ask for; see `TIMM_OPTIONS`."""
    if not WORD.fullmatch(name):
        raise ConfigError(f"{key}.name must be a name of timm's own, got {name!r:.80}; {remedy}")
    for option, value in options.items():
        if option not in TIMM_OPTIONS or not _is_plain(value):
            raise ConfigError(
                f"{key}.options.{option:.80} of a folder is not handed to timm, because it may "
                f"name files, addresses or code; {remedy}"
            )


def transformers_config(tree: Mapping[str, Any], key: str, remedy: str = TRUST) -> dict[str, Any]:
    """Returns what a folder's configuration says of the layers of one of `NETWORKS`.

    Its other keys, such as `architectures`, are left out. Raises ConfigError for another network,
    and for a value of the layers' that is no number and no word.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = tree.get("model_type")
    if kind not in NETWORKS:
        raise ConfigError(
            f"{key}.config.model_type of a folder is {kind!r:.80}, which is not built, because "
            f"such a network may load others, or kernels; {remedy}"
        )
    section = CONFIG_MAPPING[kind]
    own = {field.name for field in fields(section)} - {x.name for x in fields(PreTrainedConfig)}
    layers = {n: x for n, x in tree.items() if n in own | {*section.attribute_map} | EARLIER}
    for name, value in layers.items():
        parts = value.values() if name.startswith("rope_") and isinstance(value, dict) else [value]
        if not all(map(_is_plain, parts)):
            raise ConfigError(
                f"{key}.config.{name} of a folder must be numbers or words, got {value!r:.80}"
            )
    if tree.get("attn_implementation") in ("eager", "sdpa"):
        layers["attn_implementation"] = tree["attn_implementation"]
    return {"model_type": kind} | layers


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a word, null, or a list of such."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return (
        value is None
        or isinstance(value, int | float)
        or bool(isinstance(value, str) and WORD.fullmatch(value))
    )
