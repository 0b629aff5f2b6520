import pytest, torch
from ppo_fast.models.head import head_of
@pytest.mark.parametrize("family", ["llama","qwen2","qwen3","gemma2","cohere","granite","gpt2","mistral","phi"])
def test_x(family, tiny_model, tiny_tokenizer, tiny_model_dir):
    m = tiny_model(family)
    o = m(input_ids=torch.arange(3,20)[None]).logits
    print(family, o.std().item(), o.softmax(-1).max(-1).values.mean().item(), sum(p.numel() for p in m.parameters()), m.config._attn_implementation)
    print(head_of(m).kwargs())
    print(m.generate(torch.arange(3,7)[None], max_new_tokens=8, do_sample=False))
    t=tiny_tokenizer.apply_chat_template([{"role":"user","content":"the hotel was lovely"}], add_generation_prompt=True, tokenize=False)
    print(t, tiny_tokenizer(t).input_ids, tiny_tokenizer.decode(tiny_tokenizer(t).input_ids, skip_special_tokens=True), tiny_tokenizer("hello the").input_ids)
