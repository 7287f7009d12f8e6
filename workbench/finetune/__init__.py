"""Fine-tuning with mlx-lm, recorded and rebuilt: the job that `mlx_lm.lora` does, as an experiment of the core."""
