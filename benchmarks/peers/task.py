"""The task, the model and the batch that every contestant gets: copy three digits, as in the quickstart recipe."""

DIGITS = 3
PROMPTS = 32
SAMPLES = 8
NEW_TOKENS = DIGITS + 1
LEARNING_RATE = 1e-3
PAD, END, EQUALS, FIRST_DIGIT = 0, 1, 12, 2
VOCABULARY = 13


def qwen2_config() -> object:
    """The quickstart's model: two layers of width 64."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=PAD,
    )
