"""Code of the worker kinds: rollout, trainer, reward, reference; models, tokenizers, engines and backends."""
