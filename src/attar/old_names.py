"""Options that were renamed, moved to another verb, or removed: one table for recipes, command lines and
keywords.

An old spelling is answered by one line with the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

_TRAINING = ("distill", "recover", "train-head")
_LEARNING = ("distill", "recover")

_RENAMED: Mapping[tuple[str, ...], Mapping[str, str]] = {
    _TRAINING: {"final": "min_lr_ratio"},
    _LEARNING: {"on_policy": "student_generated", "skew": "beta"},
    ("distill", "train-head"): {"share": "teacher_generated", "samples": "num_rollouts"},
    ("distill",): {"dense": "moe_to_dense"},
    ("train-head",): {
        "norm_before_residual": "norms residual",
        "norm_before_fc": "norms states",
        "fc_norm": "norms 3.1",
        "norm_output": "norms 3.1",
    },
}

_HEADS = (
    "head drafts draft_vocabulary state_cache decay residual_layers tree tree_drafts shared_head joint "
    "base_loss heads_weight heads_schedule base_rate branches head_layers token_weight noise unrolled "
    "norm_before_residual norm_before_fc fc_norm norm_output start context_layers anchors gamma markov_rank "
    "markov ce_weight l1_weight confidence"
)
_WEIGHTS = "heads_weight heads_schedule base_rate token_weight gamma ce_weight l1_weight"
_POLICY = "discount clip_ratio reward_clip single_step teacher_mix importance length_norm whiten lm_weight"

_LIMITS = (
    "max_body max_queue max_prompts max_texts max_connections client_share header_s body_s idle_s write_s "
    "request_s drain_s alive_s priority allow_special_tokens max_loras step_tokens sequences chunk waiting "
    "waiting_tokens prefix_first"
)

_REMOVED: Mapping[tuple[str, ...], Mapping[str, str]] = {
    _TRAINING: {
        "clip": "gradients of a norm above 1 are scaled down",
        "bos": "rows begin as the tokenizer has it",
    },
    ("distill",): dict.fromkeys(_HEADS.split(), "draft heads have a verb of their own, train-head"),
    ("train-head",): dict.fromkeys(_WEIGHTS.split(), "it has the value of the paper"),
    ("serve",): {
        "unix_socket": "--host unix:PATH",
        "service_key": "the variable ATTAR_SERVICE_KEY has it",
        "service_cert": "--tls-cert is that of services too",
        "service_cert_key": "--tls-key is that of services too",
    }
    | dict.fromkeys(_LIMITS.split(), "a line of the file of --limits has it"),
    ("serve", "generate", "bench", "chat"): {"block_size": "blocks have 16 tokens"},
    ("recover",): {
        "share": "recover has no teacher's rows",
        "samples": "recover has no teacher's rows",
        "prompt_tokens": "prompts of plain text have 32 tokens",
        "rollout_temperature": "rows are generated at the temperature of the loss",
        "alignment": "it is gold",
        "feature_map": "layers at the same relative depth are compared",
    },
    ("quantize",): {"rounds": "yaqa's curvature takes one: a second left more KL"},
    _LEARNING: dict.fromkeys(_POLICY.split(), "objective minillm is the paper's loss")
    | {
        "signal": "objective sft learns from text that a teacher wrote; teacher_top and teacher_samples keep "
        "the teacher's predictions",
        "staleness": "rows are used until the student writes again, rollout_every",
        "rollout_tokens": "rows are written until they are full",
        "feature_loss": "features has hidden-cosine and hidden-relative",
        "attention_loss": "features has attention-kl and attention-scores",
        "feature_tokens": "patient compares [CLS] of an encoder, other features all tokens",
        "relation_heads": "as many as leave 16 columns",
        "relation_tokens": "64 tokens of a batch are compared",
        "map_entropy": "the entropy of a learned map has weight 0.1",
        "projection": "states are projected where the widths differ",
        "prediction_weight": "objective none learns from the features alone",
        "router_balance": "router_loss balance:0.01",
        "router_z": "router_loss z:0.001",
    },
}


def old_name(verb: str, name: str, spell: Callable[[str], str] = str) -> str | None:
    """What to say of an option that a verb had under an earlier version; None: it never had one.

    Args:
        verb: as on the command line, ``train-head``.
        name: of the option, with underscores.
        spell: makes an option's spelling of its name.
    """
    for verbs, names in _RENAMED.items():
        if verb in verbs and name in names:
            new, _, value = names[name].partition(" ")
            return f"{spell(name)} is now {' '.join(filter(None, (spell(new), value)))}"
    for verbs, names in _REMOVED.items():
        if verb in verbs and name in names:
            return f"{spell(name)} is gone: {names[name]}"
    return None
