"""Chat templates that show tools and calls in the manner of Qwen 2.5 and of Llama 3.1."""

QWEN = """\
{%- macro turn(role, body) %}{{ '<|im_start|>' + role + '\\n' + body + '<|im_end|>\\n' }}{% endmacro %}
{%- set first = messages[0].content if messages[0].role == 'system' else 'Be helpful.' %}
{%- if tools %}
    {%- set listed = namespace(text='') %}
    {%- for tool in tools %}{% set listed.text = listed.text + '\\n' + (tool | tojson) %}{% endfor %}
    {{- turn('system', first + '\\n<tools>' + listed.text + '\\n</tools>') }}
{%- else %}
    {{- turn('system', first) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- turn('user', '<tool_response>\\n' + message.content + '\\n</tool_response>') }}
    {%- elif message.role != 'system' %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '[assistant]{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}[eot]' }}
    {%- elif message.role == 'tool' %}
        {{- '[ipython]' + (message.content | tojson) + '[eot]' }}
    {%- else %}
        {{- '[' + message.role + ']' }}
        {%- if tools and message.role == 'user' and loop.last %}{{ tools | tojson }}{% endif %}
        {{- message.content | trim + '[eot]' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

ALTERNATING = """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate, beginning with user') }}
    {%- endif %}
    {{- message.role + ': ' + message.content + '\\n' }}
{%- endfor %}"""
