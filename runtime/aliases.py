"""What other code bases call our keys, for the sentence about an unknown one."""

# Our key (and how its unit differs): names of the same in nanoGPT, nanochat, torchtitan, LitGPT and
# transformers.
FOREIGN = {
    "run, whose command resumes it when it is given again": (
        "resume resume_from_checkpoint load_checkpoint auto_resume"
    ),
    "out": "out_dir output_dir dump_folder",
    "start_from, a run's or a checkpoint's folder": (
        "init_from initial_load_path initial_checkpoint_dir"
    ),
    "steps, of the optimizer, not epochs": (
        "max_iters max_steps num_iterations training_steps train_steps total_steps num_steps epochs"
        " num_epochs num_train_epochs"
    ),
    "tokens_per_param, training tokens over parameters": (
        "tokens max_tokens train_tokens target_param_data_ratio"
    ),
    "model.n_layer": "num_layers num_hidden_layers depth",
    "model.n_embd": "hidden_size d_model dim model_dim",
    "model.n_head": "num_heads num_attention_heads",
    "model.n_kv_head": "num_kv_heads num_key_value_heads n_query_groups",
    "model.head_size": "head_dim d_head kv_channels",
    "model.n_ffn": "intermediate_size ffn_dim hidden_dim ffn_hidden_size",
    "model.n_ctx": (
        "block_size seq_len max_seq_len sequence_len seq_length max_seq_length context_length"
        " n_positions"
    ),
    "model.tied": "tie_word_embeddings weight_tying",
    "data.micro_batch, sequences per forward pass and rank": (
        "batch_size device_batch_size micro_batch_size local_batch_size per_device_train_batch_size"
    ),
    "data.tokens_per_step, which counts tokens and sets accumulation": (
        "global_batch_size total_batch_size grad_accum_steps gradient_accumulation_steps"
    ),
    "data.ramp, written share of tokens:share of tokens_per_step,...": (
        "rampup_batch_size batch_size_warmup batch_warmup"
    ),
    "data.mixture, written source:weight,source:weight": "dataset dataset_name",
    "data.dir": "data_dir data_path dataset_path",
    "optim.lr": "learning_rate max_lr peak_lr",
    "optim.min_lr_ratio, a share of optim.lr": "min_lr min_lr_factor final_lr_frac",
    "optim.warmup_share, a share of all steps": (
        "warmup_iters warmup_steps lr_warmup_steps warmup_ratio"
    ),
    "optim.decay_share, a share of all steps": "decay_ratio warmdown_ratio",
    "optim.schedule": "decay_type lr_scheduler_type",
    "optim.eps": "adam_eps adam_epsilon",
    "optim.z_loss": "z_loss_multiplier z_loss_weight z_loss_coeff softmax_auxiliary_loss",
    "optim.clip": "grad_clip clip_grad_norm max_norm max_grad_norm gradient_clip_val",
    "fp8.recipe, off for BF16": (
        "dtype bf16 precision mixed_precision mixed_precision_param fp8 float8 recipe_name"
    ),
    "parallel.shard": "data_parallel_shard_degree fsdp",
    "parallel.recompute": "gradient_checkpointing activation_checkpoint activation_checkpointing",
    "checkpoint.every": "save_interval save_steps save_every interval",
    "checkpoint.keep": "save_total_limit keep_latest_k",
    "eval.every": "eval_interval eval_every eval_steps val_interval",
    "eval.tokens, of each source": "eval_iters max_eval_iters eval_tokens",
    "log.every": "log_interval log_freq logging_steps",
    "log.to, wandb, trackio or tensorboard": (
        "wandb_log report_to enable_wandb enable_tensorboard wandb_project"
    ),
}


def our_name(key: str) -> str | None:
    """Our key, and how it differs, for `key` (section or none before it), where another code base
    calls it so."""
    name = key.lower().replace("-", "_").rpartition(".")[2]
    for ours, foreign_names in FOREIGN.items():
        if name in foreign_names.split():
            return ours
    return None
