"""How a verb's help is arranged: the headings of its options, and examples besides the first."""

from __future__ import annotations

_HEADINGS = {
    "Address": "host port tls_cert tls_key cors_origin allowed_host page",
    "Callers": "api_key keys limits log_prompts",
    "Models and adapters": "name named_model model_folder model_memory compare lora lora_folder",
    "Conversations and answers": "chat_template generation_config tool_parser reasoning_parser volatile_line "
    "pooling system chat",
    "Limits of requests": "waiting waiting_tokens",
    "Services": "role target_endpoint draft_endpoint grpc_port service_ca",
    "Prompts and answers": "prompt file batch_rows",
    "Sampling": "max_tokens temperature top_p top_k min_p min_tokens n stop stop_ids ignore_eos logprobs "
    "prompt_logprobs repetition_penalty presence_penalty frequency_penalty logit_bias skip_special_tokens",
    "Structured answers": "regex json_schema grammar",
    "Engine": "engine runner activations weights dtype sequences step_tokens chunk",
    "KV cache": "kv_dtype kv_tokens eviction prefix_cache prefix_store prefix_first",
    "Speculation": "speculate draft drafts verification",
    "Text": "data sequence_length packing rows bos task predict",
    "What is learned": "objective alpha teacher_top teacher_samples alignment for_drafting head",
    "Training": "steps batch_size accumulate learning_rate optimizer warmup min_lr_ratio weight_decay "
    "precision gradient_checkpointing evaluate_every checkpoint_every patience adapter_rank adapter_init "
    "keep_zeros track",
    "Where it runs": "device launch shard on jobs cpus gpus memory_gb",
}
_OF_VERB = {
    ("distill", "temperature"): "What is learned",
    ("recover", "temperature"): "What is learned",
}

HEADING_OF = {name: heading for heading, names in _HEADINGS.items() for name in names.split()}
"""Heading of an option by its name, where its settings class has none."""

EXAMPLES = {
    "serve": (
        "attar serve out/w4 --host 0.0.0.0 --api-key 'a long secret' --limits limits.yaml",
        "attar serve org/name --lora support=out/adapter --speculate suffix --tls-cert c.pem --tls-key k.pem",
    ),
    "distill": (
        "attar distill org/name -o out/half --keep-layers 0.5 --layer-map influence --data answers.jsonl",
        "attar distill org/name -o out/draft --for-drafting --layers 2 --width 128",
    ),
    "train-head": (
        "attar train-head org/name -o out/heads --head medusa --drafts 3 --draft-vocabulary 8000",
        "attar train-head org/name -o out/new --head medusa --joint 0.75 --adapter-rank 32",
    ),
    "recover": (
        "attar recover out/pruned -o out/recovered --teacher org/name --data my.jsonl --steps 2000",
        "attar recover out/w2 -o out/tuned --teacher org/name --adapter-rank 16",
    ),
    "generate": (
        "attar generate out/w4 -p 'Why is the sky blue?' --chat --temperature 0.7",
        "attar generate out/w4 -f prompts.txt -o answers.jsonl --jobs 2",
    ),
    "export": (
        "attar export out/recovered -o small.gguf --types Q3_K_M,Q4_K_M,Q5_K_M",
        "attar export out/w4 -o out/dense --format dense",
    ),
    "collect": (
        "attar collect prompts.jsonl --teacher org/name -o data.jsonl --dry-run",
        "attar collect answers.jsonl -o good.jsonl --filter-only",
    ),
}
"""Command lines that a verb's help shows after its first example."""


def heading_of(verb: str, name: str) -> str:
    """Heading of an option of a verb whose settings class gives it none; "": the general ones."""
    return _OF_VERB.get((verb, name)) or HEADING_OF.get(name, "")
