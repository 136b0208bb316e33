"""Lists keys of other trainers without an exact counterpart: what to do, or why they have no effect."""

from __future__ import annotations

from pipeline.cli.import_configs.conversions import parse_reasons

# Entries of both tables are TEXT: KEYS, with keys of the other trainers. The text ends at the last ": ". An
# indented line continues the entry.
NO_EXACT_COUNTERPART = parse_reasons("""
write batch.micro_batch_size: auto: auto_find_batch_size
write checkpoint.keep_best: true, and eval.best_metric for another metric than the loss: greater_is_better
  load_best_model_at_end metric_for_best_model
write model.weights or adapter.weights to start from weights of the other trainer: resume_from_checkpoint
write early_stopping.patience: early_stopping_patience
an evaluation measures the loss, and no accuracy of generated text: compute_accuracy predict_with_generate
not supported: the cross entropy has no label smoothing: label_smoothing_factor
the other trainer uses it only in some preference losses; to use it here write objective.label_smoothing:
  dpo_label_smoothing label_smoothing
write distributed.timeout_seconds: ddp_timeout
the optimizer is AdamW, SGD or Adafactor; Muon is in optimizer.groups: adam_beta3 optim_args
  optim_target_modules use_badam use_galore use_muon
write optimizer.groups: embedding_lr lr_groups
8 bits are not supported; for a base in 4 bits write adapter.quantize: nf4: gptq load_in_8bit
write data.eval_sets: dataset_test_split eval_dataset test_datasets
if the strategy is not concat, write data.sources.weight: interleave_probs mix_strategy
write data.sources.max_documents: datasets.*.fraction
it changes the text of the rows; write a data.chat_template that writes the same text: chat_template_kwargs
  datasets.*.chat_template datasets.*.drop_system_message datasets.*.split_thinking default_system
  default_system_message enable_thinking tool_format
every answer of a conversation counts in the loss, unless its turn has "weight" 0: mask_history
messages have role and content, or from and value, and only the assistant's count
  in the loss; convert rows of another form: datasets.*.message_field_content datasets.*.message_field_role
  datasets.*.message_property_mappings
  datasets.*.roles datasets.*.roles_to_train datasets.*.train_on_eos
documents are packed whole by best fit, or not at all; write data.packing: batch_flattening
  curriculum_sampling packing_strategy
a sample that does not fit into a sequence is left out, and never cut: eval_sequence_len max_completion_length
  max_prompt_len max_prompt_length min_sample_len truncation_mode
add the tokens to the tokenizer's folder; model.grow_vocabulary: true adds embedding rows: add_special_tokens
  add_tokens added_tokens_overrides eos_token eot_tokens pad_token special_tokens tokens
download that revision and write its folder as model.pretrained: model_revision
write model.freeze, a list of patterns of parameters that are not trained: freeze_extra_modules
  freeze_trainable_layers
  freeze_trainable_modules unfrozen_parameters use_llama_pro
write adapter.init, which can be uniform or gaussian: pissa_init
a run trains one adapter; merge other adapters into the model first: create_new_adapter
write model.extra, which sets fields of the model's config: moe_aux_loss_coef rope_scaling
write model.activation_offload: true: activation_offloading
write model.fp8: tensorwise: fp8
only text is supported: freeze_multi_modal_projector freeze_vision_tower media_dir
write objective.sft_weight: loss_weights
the reference is the model that the run starts from: ref_model ref_model_adapters sync_ref_model
this objective has no such term: dpo_loss_type f_divergence_type ld_alpha router_aux_loss_coef use_weighting
write watch.on_spike: loss_watchdog_patience loss_watchdog_threshold
write the degree into the DeepSpeed JSON (docs/reference/splits.md): context_parallel_size
  sequence_parallel_degree tensor_parallel_size
not supported: downcast_bf16 dynamo_config fp8_config lora_rank_pattern lora_target_parameters
  megatron_lm_config parallelism_config quantization relora
write batch.gradient_accumulation_steps or optimizer.max_grad_norm into the recipe:
  deepspeed_config.gradient_accumulation_steps deepspeed_config.gradient_clipping
write model.activation_checkpointing: full into the recipe: fsdp_config.fsdp_activation_checkpointing
write nvme_path of the offload into the JSON: deepspeed_config.offload_optimizer_nvme_path
  deepspeed_config.offload_param_nvme_path
FULL_SHARD is ZeRO 3; for SHARD_GRAD_OP write stage 2 into the JSON: fsdp_config.fsdp_reshard_after_forward
  fsdp_config.fsdp_sharding_strategy
write offload_optimizer and offload_param into the JSON: fsdp_config.fsdp_offload_params
""")
"""Key -> what the user can do, or what this trainer does instead.

A key whose value switches it off is reported as without effect.
"""
NO_EFFECT = parse_reasons("""
a run writes only into its own folder, and never overwrites an existing one: overwrite_output_dir
checkpoints are always whole and in safetensors, and the command `report` plots the loss: plot_loss
  save_only_model save_safetensors
the command that you type decides what is done: do_eval do_predict do_train merge_lora strict
the launcher sets it (docs/how-to/many-machines.md): compute_environment ddp_backend debug device_map
  enable_cpu_affinity gpu_ids local_rank machine_rank main_process_ip main_process_port
  main_training_function num_machines ray_num_workers ray_run_name ray_storage_path rdzv_backend
  resources_per_worker same_network tpu_env tpu_use_cluster tpu_use_sudo use_cpu
a run resumes from its newest checkpoint by itself: auto_resume_from_checkpoints
an evaluation uses the micro-batch size of the training: eval_accumulation_steps per_device_eval_batch_size
the loss here never stores all logits either: cut_cross_entropy enable_liger_kernel
  liger_fused_linear_cross_entropy use_liger_kernel
the loss is the mean over all tokens of the global batch: average_tokens_across_devices
tokenised rows are read from memory: dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
prepared data is found again by its content, and prepared only once: dataset_prepared_path datasets.*.ds_type
  overwrite_cache
  preprocessing_batch_size shuffle_merged_datasets tokenized_path
data.packing decides on padding: eval_packing eval_sample_packing multipack_real_batches
  pad_to_multiple_of pad_to_sequence_len padding_free
the order of samples comes from the seed, and no sample is dropped: data_seed dataloader_drop_last
  disable_shuffling full_determinism group_by_length shuffle_dataset
the type is read from the model's folder: base_model_config model_type processor_type tokenizer_type
  use_fast_tokenizer
attention uses torch's fused kernels at any length: flash_attention flex_attention sdp_attention
  xformers_attention
this trainer chooses the kernels: gradient_checkpointing_kwargs liger_glu_activation liger_layer_norm
  liger_rms_norm
  liger_rope lora_mlp_kernel lora_o_kernel lora_qkv_kernel low_cpu_mem_usage plugins torch_compile_backend
  torch_compile_mode use_unsloth
4 bits are always nf4 with double quantization: bnb_4bit_quant_type double_quantization quantization_method
  quantization_type use_bnb_nested_quant
the DeepSpeed JSON sets the split, and unused parameters are reported: accelerator_config ddp
  ddp_find_unused_parameters fsdp_version fsdp_config.fsdp_version
with ZeRO 3 a model is always created in shards, and exported whole: deepspeed_config.zero3_init_flag
  deepspeed_config.zero3_save_16bit_model
the JSON sets the precision: bf16_full_eval bfloat16 dtype float16 float32 torch_dtype
reference log-probabilities are computed before step 1: precompute_ref_log_probs
dropout comes from the model's config: disable_dropout
the command `export` writes a folder that you can push to the hub: hub_model_id hub_private_repo
  hub_strategy hub_token push_to_hub
the model gets only the columns that it takes: remove_unused_columns
metrics.jsonl has one row per log.every steps: disable_tqdm include_num_input_tokens_seen
  include_tokens_per_second log_level logging_dir logging_first_step logging_strategy
W&B is set up by the keys in docs/reference/configuration.md: use_wandb wandb_log_model wandb_run_id
  wandb_watch
an evaluation always precedes the first step: eval_on_start
it is for generation; the command `generate` has options for it: infer_backend max_new_tokens
  temperature top_p
""")
"""Key -> reason for which it changes nothing here, whatever its value is."""
