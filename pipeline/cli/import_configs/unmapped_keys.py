"""Keys of any tool without an exact counterpart here: what to do about them, or why they change nothing."""

from __future__ import annotations

from pipeline.cli.import_configs.conversions import parse_reasons

LEFT_OPEN = parse_reasons("""
write batch.micro_batch_size, auto: auto_find_batch_size
write checkpoint.keep_best; eval.best_metric says by which number: greater_is_better
  load_best_model_at_end metric_for_best_model
write model.weights or adapter.weights to start from another trainer's weights: resume_from_checkpoint
write early_stopping.patience: early_stopping_patience
every evaluation is of the loss: compute_accuracy predict_with_generate
the loss is the cross entropy without smoothing: label_smoothing_factor
not every loss reads it there; write objective.label_smoothing: dpo_label_smoothing label_smoothing
write distributed.timeout_seconds: ddp_timeout
the optimizer is AdamW, SGD or Adafactor; Muon is in optimizer.groups: adam_beta3 optim_args
  optim_target_modules use_badam use_galore use_muon
write optimizer.groups: embedding_lr lr_groups
eight bits are not built here: gptq load_in_8bit
write data.eval_sets: dataset_test_split eval_dataset test_datasets
write data.sources.weight, if it is not concat: interleave_probs mix_strategy
write data.sources.max_documents: datasets.*.fraction
it changes the text of the rows, which data.chat_template writes here: chat_template_kwargs
  datasets.*.chat_template datasets.*.drop_system_message datasets.*.split_thinking default_system
  default_system_message enable_thinking tool_format
every answer of a conversation is learned; rows can say which (docs/data.md): mask_history
read are role and content, or from and value, and learned is what the assistant
  says: datasets.*.message_field_content datasets.*.message_field_role datasets.*.message_property_mappings
  datasets.*.roles datasets.*.roles_to_train datasets.*.train_on_eos
rows are packed whole, by best fit, or stand alone: batch_flattening curriculum_sampling packing_strategy
what does not fit a sequence is left out, and never cut: eval_sequence_len max_completion_length
  max_prompt_len max_prompt_length min_sample_len truncation_mode
write them into the tokenizer's folder; model.grow_vocabulary adds rows: add_special_tokens add_tokens
  added_tokens_overrides eos_token eot_tokens pad_token special_tokens tokens
name a folder of that revision as model.pretrained: model_revision
write model.freeze, patterns of what stays as it is: freeze_extra_modules freeze_trainable_layers
  freeze_trainable_modules unfrozen_parameters use_llama_pro
adapter.init has uniform and gaussian: pissa_init
one adapter is trained; merge others into the model first: create_new_adapter
write model.extra, fields of the model's config: moe_aux_loss_coef rope_scaling
write model.activation_offload: activation_offloading
write model.fp8: fp8
text alone is read: freeze_multi_modal_projector freeze_vision_tower media_dir
write objective.sft_weight: loss_weights
the reference is the model that the run starts from: ref_model ref_model_adapters sync_ref_model
no term of this objective: dpo_loss_type f_divergence_type ld_alpha router_aux_loss_coef use_weighting
write watch.on_spike: loss_watchdog_patience loss_watchdog_threshold
write it into the split's file: context_parallel_size sequence_parallel_degree tensor_parallel_size
not built here: downcast_bf16 dynamo_config fp8_config lora_rank_pattern lora_target_parameters
  megatron_lm_config parallelism_config quantization relora
write it into the recipe: deepspeed_config.gradient_accumulation_steps deepspeed_config.gradient_clipping
write model.activation_checkpointing, full, into the recipe: fsdp_config.fsdp_activation_checkpointing
write nvme_path into the JSON: deepspeed_config.offload_optimizer_nvme_path
  deepspeed_config.offload_param_nvme_path
FULL_SHARD is ZeRO 3; for SHARD_GRAD_OP write stage 2 into the JSON: fsdp_config.fsdp_reshard_after_forward
  fsdp_config.fsdp_sharding_strategy
write offload_optimizer and offload_param into the JSON: fsdp_config.fsdp_offload_params
""")
"""Key -> what to do about it. One that is switched off means the same here."""
NO_EFFECT = parse_reasons("""
a run's folder has all that it leaves, and an existing one is never overwritten: overwrite_output_dir
  plot_loss save_only_model save_safetensors
the command says what is done: do_eval do_predict do_train merge_lora strict
the launcher says it (docs/multi_node.md): compute_environment ddp_backend debug device_map
  enable_cpu_affinity gpu_ids local_rank machine_rank main_process_ip main_process_port
  main_training_function num_machines ray_num_workers ray_run_name ray_storage_path rdzv_backend
  resources_per_worker same_network tpu_env tpu_use_cluster tpu_use_sudo use_cpu
a run goes on by itself: auto_resume_from_checkpoints
an evaluation takes micro-batches of the training's size: eval_accumulation_steps per_device_eval_batch_size
the blockwise loss keeps no logits either: cut_cross_entropy enable_liger_kernel
  liger_fused_linear_cross_entropy use_liger_kernel
the loss is the mean over all tokens of the global batch: average_tokens_across_devices
tokenised rows are read from memory: dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
data are prepared once and kept by content: dataset_prepared_path datasets.*.ds_type overwrite_cache
  preprocessing_batch_size shuffle_merged_datasets tokenized_path
rows are padded or packed without a choice: eval_packing eval_sample_packing multipack_real_batches
  pad_to_multiple_of pad_to_sequence_len padding_free
the order of samples is drawn from the seed, and every sample counts: data_seed dataloader_drop_last
  disable_shuffling full_determinism group_by_length shuffle_dataset
the model's folder says what it is: base_model_config model_type processor_type tokenizer_type
attention is torch's flash kernels, whatever the length: flash_attention flex_attention sdp_attention
  xformers_attention
kernels are chosen here: gradient_checkpointing_kwargs liger_glu_activation liger_layer_norm liger_rms_norm
  liger_rope lora_mlp_kernel lora_o_kernel lora_qkv_kernel low_cpu_mem_usage plugins torch_compile_backend
  torch_compile_mode use_fast_tokenizer use_unsloth
of quantization there is one kind: bnb_4bit_quant_type double_quantization quantization_method
  quantization_type use_bnb_nested_quant
the split's file decides, and unused parameters are named: accelerator_config ddp
  ddp_find_unused_parameters fsdp_version
models are built cut, and checkpoints are whole: deepspeed_config.zero3_init_flag
  deepspeed_config.zero3_save_16bit_model fsdp_config.fsdp_version
the JSON says in what the model computes: bf16_full_eval bfloat16 dtype float16 float32 torch_dtype
reference log-probabilities are computed before step 1: precompute_ref_log_probs
dropout is as the model's config has it: disable_dropout
what `export` writes can be pushed: hub_model_id hub_private_repo hub_strategy hub_token push_to_hub
the model decides what it is given: remove_unused_columns
metrics.jsonl has a row each log.every steps: disable_tqdm include_num_input_tokens_seen
  include_tokens_per_second log_level logging_dir logging_first_step logging_strategy
W&B gets what docs/configuration.md says: use_wandb wandb_log_model wandb_run_id wandb_watch
the first evaluation stands before the first step: eval_on_start
it serves generation, which is the command generate: infer_backend max_new_tokens temperature top_p
""")
"""Key -> why it changes nothing here, whatever its value."""
