"""Chat templates as model families write them, in miniature, and a small byte-level tokenizer to use them with."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from distflow.workers.tokenizers import PretrainedTokenizer

SPECIAL = [
    "<pad>",
    "</s>",
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "[INST]",
]

QWEN = """\
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}\
{%- endif %}{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}\
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}\
{%- endif %}
{{- content }}
{%- for c in m.tool_calls or [] %}{%- set f = c.function or c %}
{{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}{{- f.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Qwen's way: ChatML, tools as JSON, reasoning of turns before the last user's left out."""

LLAMA2 = """\
{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% else %}\
{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}"""
"""Llama 2's way: no turn begins without the token for the beginning, which the template writes; nothing of tools."""

GLM = """\
{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}\
{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}\
{% elif m.role == 'tool' %}{{ '<|observation|>\\n' + m.content }}{% else %}{{ '<|user|>\\n' + m.content }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
"""GLM's way: a turn ends where the marker of the next one begins."""

PLAIN = """\
{% for m in messages %}{{ 'A: ' if m.role == 'assistant' else 'Q: ' }}{{ m.content }}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"""
"""Roles as plain text, and no token that ends a turn."""

MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}\
{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST]' + m.content + '[/INST]' }}\
{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}\
{{ ']' + eos_token }}{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + {'content': m.content} | tojson }}[/TOOL_RESULTS]\
{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"""
"""Mistral's way: calls instead of content, results as JSON."""

PARTS = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% for p in m.content %}{{ p.text }};{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""One that reads content as parts alone, as those of models for pictures do."""

PHI = """\
{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content + '<|im_end|>\\n' }}\
{% endfor %}{{ '<|assistant|>' if add_generation_prompt else eos_token }}"""
"""Phi 3's way: a token more behind a conversation that ends than behind each turn."""

DEEPSEEK = """\
{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}{{ m.content or '' }}\
{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{{ eos_token }}\
{% else %}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"""
"""DeepSeek's way: arguments of calls are text."""

FAMILIES = {"qwen": QWEN, "llama2": LLAMA2, "glm": GLM, "plain": PLAIN, "mistral": MISTRAL, "parts": PARTS}
FAMILIES |= {"phi": PHI, "deepseek": DEEPSEEK}


R1 = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}\
{% elif m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}\
{{ '<|assistant|><call>' + c.function.name + '\\n' + c.function.arguments + '</call>' + eos_token }}{% endfor %}\
{% elif m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}\
{% else %}{{ '<|observation|>' + m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""
"""DeepSeek R1's way: an answer is asked for as a thought, and written without it; a turn that calls has no content."""

QWEN3 = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}\
{% set c = m.content or '' %}{% set r = m.reasoning_content or '' %}\
{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] %}\
{% set c = c.split('</think>')[-1] %}{% endif %}\
{% if loop.last %}{{ '<think>\\n' + r.strip() + '\\n</think>\\n\\n' }}{% endif %}{{ c.strip() }}\
{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Qwen 3's way: the last answer has a thought, an empty one if none is given."""

THINKING = {"r1": R1, "qwen3": QWEN3}


def byte_tokenizer(folder: Path, template: str | None = None, *, bos: bool = False) -> PretrainedTokenizer:
    """A tokenizer of bytes, saved in a folder and read from there; `bos`: it puts `<s>` before texts by itself."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.train_from_iterator(
        ["none"],
        trainers.BpeTrainer(
            vocab_size=256 + len(SPECIAL),
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    pretrained = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    pretrained.chat_template = template
    pretrained.save_pretrained(folder)
    return PretrainedTokenizer(str(folder))
