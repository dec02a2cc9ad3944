"""Looking at what a target's forwards return."""


def answers_of(target):
    """A list that every forward of `target` appends its logits and features to."""
    answers, forward = [], target._runtime.forward

    def watched(*arguments, **options):
        answers.append(forward(*arguments, **options))
        return answers[-1]

    target._runtime.forward = watched
    return answers
