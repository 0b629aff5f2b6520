import copy
import json

import pytest

from ppo_fast.errors import UserError
from ppo_fast.training.data import Prompt, PromptSampler, dataset_hash, read_prompts, split_prompts, tokenize


def rows(count):
    return [{"prompt": f"prompt {i}", "label": i} for i in range(count)]


def test_columns_travel_with_the_prompt():
    prompt = read_prompts([{"prompt": "a", "answer": 4, "kind": "sum"}])[0]
    assert (prompt.text, prompt.columns) == ("a", {"answer": 4, "kind": "sum"})


def test_jsonl_is_read_line_by_line(tmp_path):
    file = tmp_path / "p.jsonl"
    odd = "ä\u2028b\x85c"  # line separators of Unicode, not of JSONL
    file.write_text(f'{{"prompt": "{odd}"}}\n\n{{"prompt": [{{"role": "user", "content": "b"}}]}}\n', encoding="utf-8")
    assert [p.text for p in read_prompts(file)] == [odd, "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a"}', "row 1 of the dataset has no 'prompt' column .it has question."),
        ('{"prompt": "a"}\n{"prompt": 3}', "the prompt in row 2"),
        ('{"prompt": "a"}\nnot json', "line 2 of .* isn't JSON"),
        ("[1]", "isn't a JSON object"),
        ("", "has no rows"),
        ('{"prompt": [{"role": "user"}]}', "neither text nor a list of messages"),
        ('{"prompt": []}', "neither text nor a list of messages"),
        ('{"prompt": [{"role": "user", "content": null}]}', "neither text nor a list of messages"),
        (r'{"prompt": "a \udc00"}', "half of a surrogate pair"),
        (r'{"prompt": [{"role": "user", "content": "\ud83d"}]}', "half of a surrogate pair"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(file)


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(r'{"prompt": "\ud83d\ude00"}')
    assert read_prompts(file)[0].text == "\N{GRINNING FACE}"


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "sch\xf6n"}')
    with pytest.raises(UserError, match=r"p\.jsonl' isn't UTF-8 text; save it as UTF-8"):
        read_prompts(file)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}')
    assert read_prompts(file)[0].text == "a"


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no dataset file .*nowhere\.jsonl"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_split_ignores_the_order_of_the_file():
    prompts = read_prompts(rows(50))
    train, heldout = split_prompts(prompts, 10)
    _, shuffled = split_prompts(prompts[::-1], 10)
    assert len(train) == 40
    assert {p.text for p in heldout} == {p.text for p in shuffled}
    assert not {p.text for p in heldout} & {p.text for p in train}


def test_split_that_leaves_no_training_prompts_is_refused():
    with pytest.raises(UserError, match="heldout = 5 of 5"):
        split_prompts(read_prompts(rows(5)), 5)


def test_equal_prompts_stay_on_one_side():
    prompts = read_prompts([{"prompt": f"prompt {i % 12}", "row": i} for i in range(36)])
    train, heldout = split_prompts(prompts, 7)
    assert not {p.text for p in heldout} & {p.text for p in train}
    assert len(heldout) == 9  # three prompts of three rows each are the fewest that make seven
    assert sorted(p.columns["row"] for p in train + heldout) == list(range(36))


def test_a_repeated_prompt_alone_leaves_none_to_train_on():
    with pytest.raises(UserError, match=r"heldout = 1 of 3 prompts \(1 of them distinct\)"):
        split_prompts(read_prompts([{"prompt": "a"}] * 3), 1)
    assert [len(side) for side in split_prompts(read_prompts([{"prompt": "a"}] * 3), 0)] == [3, 0]


def test_half_a_surrogate_pair_can_be_hashed():
    prompts = [Prompt("\ud800", {}), Prompt("\ud801", {}), Prompt("b", {})]
    assert len({dataset_hash([prompt]) for prompt in prompts}) == 3
    assert len(split_prompts(prompts, 1)[1]) == 1


def test_dataset_hash_sees_order_and_text():
    prompts = read_prompts(rows(4))
    assert dataset_hash(prompts) == dataset_hash(read_prompts(rows(4)))
    assert dataset_hash(prompts) != dataset_hash(prompts[::-1])


def test_sampler_draws_every_prompt_once_before_any_twice():
    sampler = PromptSampler(7, seed=0)
    first = sampler.draw(3) + sampler.draw(4)
    assert sorted(first) == list(range(7))
    second = sampler.draw(7)
    assert sorted(second) == list(range(7))
    assert second != first


def test_sampler_resumes_to_the_draw():
    sampler = PromptSampler(5, seed=1)
    sampler.draw(3)
    state = json.loads(json.dumps({"order": sampler.state()["order"]})) | {"generator": sampler.state()["generator"]}
    expected = [sampler.draw(4) for _ in range(5)]
    other = PromptSampler(5, seed=99)
    other.load(state)
    assert [other.draw(4) for _ in range(5)] == expected


def test_prompts_that_cannot_be_replied_to_are_named(tiny_tokenizer):
    words = [w for w in sorted(tiny_tokenizer.get_vocab()) if w.isalpha()]
    long = read_prompts([{"prompt": " ".join(words[:6])}])
    assert len(tokenize(long, tiny_tokenizer, limit=6)[0]) == 6
    with pytest.raises(UserError, match=r"has 6 tokens; .* leaves 5"):
        tokenize(long, tiny_tokenizer, limit=5)
    with pytest.raises(UserError, match="response_length is 44 tokens longer than the model's context"):
        tokenize(long, tiny_tokenizer, limit=-44)
    with pytest.raises(UserError, match="response_length fills the model's context"):
        tokenize(long, tiny_tokenizer, limit=0)
    with pytest.raises(UserError, match="has no tokens"):
        tokenize(read_prompts([{"prompt": ""}]), tiny_tokenizer, limit=5)


def test_chats_that_the_tokenizer_has_no_form_for_are_named(tiny_tokenizer):
    chat = read_prompts([{"prompt": [{"role": "user", "content": "the room"}]}])
    plain = copy.deepcopy(tiny_tokenizer)
    plain.chat_template = None
    with pytest.raises(UserError, match=r"the tokenizer has no chat template; drop data.template"):
        tokenize(chat, plain, limit=9)
    plain.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"refuses the prompt 'the room' \(roles must alternate\)"):
        tokenize(chat, plain, limit=9)
