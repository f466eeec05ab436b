"""Where the figures of a run go beside metrics.jsonl: TensorBoard, W&B, MLflow, trackio."""
