"""Made-up questions in the layout of one task of each kind (endings of a text, answers of varying number, letters after
examples, yes or no, the text before a word), lengths and words of the answers independent of the label.

`balanced` questions come once with each answer as the right one: whoever looks at the texts alone, however he decides, is
right exactly once per question, so that his score is chance to the last digit.
"""

import random
from typing import NamedTuple

import datasets

LETTERS = "ABCDE"


class Question(NamedTuple):
    id: str                 # "q17x": in the question's text, and nowhere else
    stem: str
    choices: list[str]
    label: int


def words(rng, low, high):
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 7))) for _ in range(rng.randint(low, high)))


def questions(rng, n, n_choices, balanced):
    """n questions, each n_choices(i) times where `balanced`; the texts never depend on the label."""
    made = []
    for i in range(n):
        k = n_choices(i)
        stem, choices = words(rng, 4, 12), [words(rng, 1, 6) + f" {c}{i}" for c in range(k)]
        made += [Question(f"q{i}x", stem, choices, label) for label in (range(k) if balanced else [rng.randrange(k)])]
    rng.shuffle(made)
    return made


def lettered(q, start="A"):
    return {"text": q.choices, "label": [chr(ord(start) + c) for c in range(len(q.choices))]}


def arc(q):
    start = "A" if len(q.stem) % 3 else "1"       # a part of the real questions is numbered, some have 3 or 5 answers
    return {"id": q.id, "question": f"{q.id} {q.stem}?", "choices": lettered(q, start), "answerKey": chr(ord(start) + q.label)}


def hellaswag(q):
    return {"ind": 0, "activity_label": f"{q.id} doing", "ctx_a": q.stem, "ctx_b": "then", "ctx": f"{q.stem} then",
            "endings": q.choices, "source_id": "", "split": "val", "split_type": "indomain", "label": str(q.label)}


def boolq(q):
    return {"question": f"{q.id} {q.choices[0]}", "passage": q.stem, "idx": 0, "label": q.label}


def winogrande(q):
    return {"sentence": f"{q.id} {q.stem} _ {q.stem[::-1]}.", "option1": q.choices[0], "option2": q.choices[1],
            "answer": str(q.label + 1)}


def mmlu(q):
    return {"question": f"{q.id} {q.stem}", "subject": "made up", "choices": q.choices, "answer": q.label}


# task: (data set, its configuration, split, row, number of answers of the i-th question)
LAYOUTS = {
    "hellaswag": ("Rowan/hellaswag", None, "validation", hellaswag, lambda i: 4),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test", arc, lambda i: (4, 4, 3, 5)[i % 4]),
    "boolq": ("aps/super_glue", "boolq", "validation", boolq, lambda i: 2),
    "winogrande": ("allenai/winogrande", "winogrande_xl", "validation", winogrande, lambda i: 2),
    "mmlu_anatomy": ("cais/mmlu", "anatomy", "test", mmlu, lambda i: 4),
}


def make(n, balanced, seed=0):
    """What serves as datasets.load_dataset for every layout, and {task: {question's id: what its right answer says}}."""
    truth, made = {}, {}
    for task, (path, name, split, row, n_choices) in LAYOUTS.items():
        asked = questions(random.Random(f"{seed}/{task}"), n, n_choices, balanced)
        shown = questions(random.Random(f"{seed}/{task}/dev"), 5, n_choices, False)
        splits = {split: asked, "dev": [q._replace(id=q.id.replace("x", "d")) for q in shown]}      # examples: never asked
        rows = {split: datasets.Dataset.from_list(list(map(row, of))) for split, of in splits.items()}
        made[path, name] = dict.fromkeys(("train", "validation", "test"), rows[split].select([])) | rows
        says = {"boolq": lambda q: ("no", "yes")[q.label]}.get(task) or (
            (lambda q: LETTERS[q.label]) if row is mmlu else lambda q: q.choices[q.label])
        truth[task] = {q.id: says(q) for q in asked}
    return lambda path, name, **_: made[path, name], truth
