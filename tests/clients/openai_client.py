#!/usr/bin/env python3
"""OpenAI's Python client against a daemon with the demo model: openai_client.py URL"""

import sys

import openai


def main(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    ask = {"model": model, "prompt": "In the beginning God", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask, logprobs=2, echo=True)
    choice = whole.choices[0]
    assert choice.text.startswith("In the beginning God") and choice.finish_reason == "length"
    assert len(choice.logprobs.tokens) == whole.usage.total_tokens
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[1]
    parts = list(client.completions.create(**ask, stream=True,
                                           stream_options={"include_usage": True}))
    text = "".join(c.choices[0].text for c in parts if c.choices)
    assert "In the beginning God" + text == choice.text, text
    assert parts[-1].usage.completion_tokens == 12 and not parts[-1].choices
    many = client.completions.create(model=model, prompt=["And", "God said"], n=2, max_tokens=3)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    messages = [{"role": "system", "content": "Answer."},
                {"role": "user", "content": "Who is the LORD?"}]
    on = {"ignore_eos": True}  # the demo model never saw a chat, and would end at once
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=8,
                                          temperature=0, logprobs=True, top_logprobs=2,
                                          extra_body=on)
    assert chat.choices[0].message.role == "assistant" and chat.choices[0].message.content
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    text = ""
    for part in client.chat.completions.create(model=model, messages=messages, max_tokens=8,
                                               temperature=0, stream=True, extra_body=on):
        text += part.choices[0].delta.content or ""
    assert text == chat.choices[0].message.content, text
    for wrong, kind in (({"model": "none"}, openai.NotFoundError),
                        ({"max_tokens": -1}, openai.BadRequestError),
                        ({"prompt": ""}, openai.BadRequestError)):
        try:
            client.completions.create(**{**ask, **wrong})
            raise AssertionError(f"{wrong} was taken")
        except kind as e:
            assert e.body["message"], e
    stream = client.completions.create(model=model, prompt="And", max_tokens=4000, stream=True,
                                       extra_body=on)
    next(iter(stream))
    stream.close()
    print(f"openai {openai.__version__}: ok")


main(sys.argv[1])
