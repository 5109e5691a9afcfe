"""Made-up questions in the layout of every multiple-choice task, lengths and words of the answers independent of the label.

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


def openbookqa(q):
    return {"id": q.id, "question_stem": f"{q.id} {q.stem}", "choices": lettered(q), "answerKey": LETTERS[q.label]}


def sciq(q):
    others = [text for c, text in enumerate(q.choices) if c != q.label]
    return {"question": f"{q.id} {q.stem}?", "distractor1": others[0], "distractor2": others[1], "distractor3": others[2],
            "correct_answer": q.choices[q.label], "support": q.stem[::-1]}


def hellaswag(q):
    return {"ind": 0, "activity_label": f"{q.id} doing", "ctx_a": q.stem, "ctx_b": "then", "ctx": f"{q.stem} then",
            "endings": q.choices, "source_id": "", "split": "val", "split_type": "indomain", "label": str(q.label)}


def piqa(q):
    return {"goal": f"{q.id} {q.stem}", "sol1": q.choices[0], "sol2": q.choices[1], "label": q.label}


def boolq(q):
    return {"question": f"{q.id} {q.choices[0]}", "passage": q.stem, "idx": 0, "label": q.label}


def winogrande(q):
    return {"sentence": f"{q.id} {q.stem} _ {q.stem[::-1]}.", "option1": q.choices[0], "option2": q.choices[1],
            "answer": str(q.label + 1)}


def mmlu(q):
    return {"question": f"{q.id} {q.stem}", "subject": "made up", "choices": q.choices, "answer": q.label}


def commonsense_qa(q):
    return {"id": q.id, "question": f"{q.id} {q.stem}?", "question_concept": "x", "choices": lettered(q),
            "answerKey": LETTERS[q.label]}


# task: (data set, its configuration, split, row, number of answers of the i-th question)
LAYOUTS = {
    "hellaswag": ("Rowan/hellaswag", None, "validation", hellaswag, lambda i: 4),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test", arc, lambda i: (4, 4, 3, 5)[i % 4]),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test", arc, lambda i: 4),
    "openbookqa": ("allenai/openbookqa", "main", "test", openbookqa, lambda i: 4),
    "sciq": ("allenai/sciq", None, "test", sciq, lambda i: 4),
    "piqa": ("baber/piqa", None, "validation", piqa, lambda i: 2),
    "boolq": ("aps/super_glue", "boolq", "validation", boolq, lambda i: 2),
    "winogrande": ("allenai/winogrande", "winogrande_xl", "validation", winogrande, lambda i: 2),
    "commonsense_qa": ("tau/commonsense_qa", None, "validation", commonsense_qa, lambda i: 5),
    "mmlu_anatomy": ("cais/mmlu", "anatomy", "test", mmlu, lambda i: 4),
    "mmlu_professional_law": ("cais/mmlu", "professional_law", "test", mmlu, lambda i: 4),
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
            (lambda q: LETTERS[q.label]) if row in (mmlu, commonsense_qa) else lambda q: q.choices[q.label])
        truth[task] = {q.id: says(q) for q in asked}
    return lambda path, name, **_: made[path, name], truth
