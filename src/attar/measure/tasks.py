"""The tasks of an evaluation: files of multiple-choice questions, and recall."""

from __future__ import annotations

from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.measure.multiple_choice import TaskAnswers, answer_task, read_questions
from attar.measure.recall import answer_recall, recall_length
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject
from attar.progress import SILENT, Progress


def check_tasks(settings: EvaluateSettings) -> None:
    """Raise AttarError where a file cannot be read or a name is no task's, before a model is loaded."""
    for task in settings.tasks:
        if recall_length(task) is None:
            read_questions(task, settings.tasks_limit)


def answer_tasks(
    subject: Subject,
    settings: EvaluateSettings,
    *,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> dict[str, TaskAnswers]:
    """A subject's answers to the settings' tasks, by name. Raises as :func:`answer_task` and
    :func:`answer_recall`."""
    answers: dict[str, TaskAnswers] = {}
    for task in settings.tasks:
        if recall_length(task) is None:
            questions = read_questions(task, settings.tasks_limit)
            answers[task] = answer_task(subject, questions, processes=processes, progress=progress)
        else:
            answers[task] = answer_recall(subject, task, settings, processes=processes, progress=progress)
    return answers
