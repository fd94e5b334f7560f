"""StepThrough: one training step of the launched ranks, stage by stage, with the tensors that every rank had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anywidget
import traitlets

from recshard_lab.lab import views
from recshard_lab.lab.draw.view import View
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.exporting.report import Section
from recshard_lab.lab.live.recorded_step import STAGES, RecordedStep, record, record_under
from recshard_lab.lab.views.step_frames import NARROW, WIDE, draw_frame
from recshard_lab.lab.views.step_pieces import Shown, followed, shown_frames
from recshard_lab.lab.widgets import page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.components import script, style
from recshard_lab.sharding import ShardingPlan


class StepPlayer(anywidget.AnyWidget):
    """The frames on the page, with buttons and keys: arrow keys change the stage, space plays or pauses.

    Attributes:
        steps: for each step ``name``, ``about``, and its frames as SVG, ``wide`` and ``narrow``.
        stages: names of the stages.
        choices: ``(name, key)`` of what can be followed.
        stage: index of the stage that is shown.
        follow: key of what is outlined; empty for nothing.
    """

    _esm = script("step_through")
    _css = style("step_through")
    steps = traitlets.List(traitlets.Dict()).tag(sync=True)
    stages = traitlets.List(traitlets.Unicode()).tag(sync=True)
    choices = traitlets.List(traitlets.Tuple()).tag(sync=True)
    stage = traitlets.Int(0).tag(sync=True)
    follow = traitlets.Unicode().tag(sync=True)

    @traitlets.validate("stage")
    def _known_stage(self, proposal: Any) -> int:
        stage = int(proposal["value"])
        if not 0 <= stage < len(STAGES):
            raise ValueError(f"stage must be 0 to {len(STAGES) - 1}, got {stage!r}. Fix: stage=0")
        return stage

    @traitlets.validate("follow")
    def _known_key(self, proposal: Any) -> str:
        key = str(proposal["value"])
        known = [one for _, one in self.choices]
        if key and key not in known:
            raise ValueError(
                f"follow must be a sample or a row that is shown, one of {known}, got {key!r}. Fix: follow=''"
            )
        return key


class StepThrough(LabWidget):
    """Trains one step on the launched ranks, and shows it stage by stage with the tensors that were really there.

    The frames show ids, rows and gradients of a few samples. One sample or one table row is outlined in all stages.
    The step is a real one: afterwards the model has taken it. Its times are those of this one step, of which the first
    one of a model is slow.

    Args:
        ranks: the launched session.
        model: name of a `DistributedModelParallel` on the ranks, with pooled tables.
        batch: expression on the ranks for the argument of the model.
        loss: expression on the ranks for a function of the model's output that returns the loss. Left out, the model
            returns its loss, alone or first in a tuple.
        optimizer: name of the torch optimizer that steps the dense layers. Left out, they are not stepped.
        path: module path of the collection. Left out, the model's only collection.
        samples: how many samples are shown at most, over all ranks.
        features: which features are shown; the first three when left out.
        follow: what is outlined: ``"sample A"``, or ``"movie:7"`` for row 7 of a table. The first sample when left out.

    Attributes:
        steps: the recorded steps.
        player: the frames on the page; set its ``stage`` and ``follow``.

    Raises:
        LaunchError: the ranks have ended. RankError: a rank raised, such as for a name that it does not have.
        ValueError: a feature is unknown, or `samples` is below 1.
    """

    def __init__(
        self,
        ranks: Any,
        model: str = "model",
        *,
        batch: str,
        loss: str | None = None,
        optimizer: str | None = None,
        path: str | None = None,
        samples: int = 8,
        features: Sequence[str] | None = None,
        follow: str | None = None,
    ) -> None:
        step = record(ranks, model, batch, loss=loss, optimizer=optimizer, path=path)
        arguments = {"loss": loss, "optimizer": optimizer, "path": path}
        more = "".join(f", {name}={value!r}" for name, value in arguments.items() if value is not None)
        self._show([step], samples, features, follow, f"StepThrough(ranks, {model!r}, batch={batch!r}{more})")

    @classmethod
    def compare(
        cls,
        ranks: Any,
        plans: Mapping[str, ShardingPlan],
        model: str = "model",
        *,
        batch: str,
        loss: str | None = None,
        optimizer: str | None = None,
        path: str | None = None,
        samples: int = 8,
        features: Sequence[str] | None = None,
        follow: str | None = None,
    ) -> StepThrough:
        """The same step under several plans, side by side. Each starts from the same weights.

        Plan, weights and optimizer states of the model are restored afterwards.

        Args:
            plans: name -> plan. Tables that a plan does not name keep their shards.
            ranks, model, batch, loss, optimizer, path, samples, features, follow: as for `StepThrough`.

        Raises:
            As `StepThrough`. ValueError: no plan.
        """
        if not plans:
            raise ValueError("plans is empty: there is nothing to compare. Fix: plans={'row-wise': plan, ...}")
        steps = record_under(ranks, dict(plans), model, batch, loss=loss, optimizer=optimizer, path=path)
        arguments = {"loss": loss, "optimizer": optimizer, "path": path}
        more = "".join(f", {name}={value!r}" for name, value in arguments.items() if value is not None)
        call = f"StepThrough.compare(ranks, plans, {model!r}, batch={batch!r}{more})"
        return cls.of(steps, samples=samples, features=features, follow=follow, python=call)

    @classmethod
    def of(
        cls,
        steps: Sequence[RecordedStep],
        *,
        samples: int = 8,
        features: Sequence[str] | None = None,
        follow: str | None = None,
        python: str = "",
    ) -> StepThrough:
        """Shows steps that were recorded before.

        Args:
            steps: side by side.
            samples, features, follow: as for `StepThrough`.
            python: what made them, to be copied.
        """
        made = cls.__new__(cls)
        made._show(list(steps), samples, features, follow, python)
        return made

    def _show(
        self,
        steps: list[RecordedStep],
        samples: int,
        features: Sequence[str] | None,
        follow: str | None,
        python: str,
    ) -> None:
        super().__init__("step-through", "step", kinds=("html", "svg", "png"))
        self.steps, self.samples, self.features = steps, samples, features
        self.python = f"from recshard_lab.lab import StepThrough\n{python}" if python else ""
        shown = [Shown(step, samples, features) for step in steps]
        frames = [shown_frames(one) for one in shown]
        choices = list(dict.fromkeys(choice for own in frames for choice in followed(own)))
        if follow is None:
            follow = choices[0][1] if choices else ""
        self.player = StepPlayer(
            choices=choices,
            stages=list(STAGES.values()),
            steps=[
                {
                    "name": step.name,
                    "about": self._view(step).summary,
                    "wide": [str(draw_frame(frame, WIDE, f"rs-w{n}-{frame.number}")) for frame in own],
                    "narrow": [str(draw_frame(frame, NARROW, f"rs-n{n}-{frame.number}")) for frame in own],
                }
                for n, (step, own) in enumerate(zip(steps, frames, strict=True))
            ],
            follow=follow,
        )
        self.code.value = page.code(self.python) if self.python else ""
        self.lay_out([self.player])

    def _view(self, step: RecordedStep) -> View:
        return views.step_frames(step, samples=self.samples, features=self.features)

    @property
    def views(self) -> list[View]:
        """The static twin: a strip of frames for each step, with what is followed now outlined."""
        return [
            views.step_frames(step, samples=self.samples, features=self.features, follow=self.player.follow)
            for step in self.steps
        ]

    def exportable(self) -> Exportable:
        """The strips of frames."""
        shown = self.views
        return Exportable(
            shown[0].title if len(shown) == 1 else "Step, stage by stage",
            [Section(step.name or "The stages", [view]) for step, view in zip(self.steps, shown, strict=True)],
            python=self.python,
            pictures={step.name: [view] for step, view in zip(self.steps, shown, strict=True)},
        )

    def static(self) -> tuple[str, str]:
        """The strip of frames of each step."""
        shown = self.views
        return "".join(view.img for view in shown), "\n\n".join(view.text for view in shown)
