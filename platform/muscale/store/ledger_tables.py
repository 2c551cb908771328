"""The ledger's tables, one for each kind of fact."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

SCHEMA = 10
"""Raise it when a table, an index or the meaning of a column changes. Ledgers of another schema are refused: no release has
ledgers that would need to be migrated."""


class _JsonText(sa.TypeDecorator[Any]):
    """JSON as text: PostgreSQL's own type refuses NaN and infinities, which results may hold."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str:
        """Convert a value to the database's."""
        return json.dumps(value)

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Convert a value from the database's."""
        return None if value is None else json.loads(value)


JSON = sa.JSON().with_variant(_JsonText(), "postgresql")
metadata = sa.MetaData()

studies = sa.Table(
    "studies",
    metadata,
    sa.Column("study", sa.Integer, primary_key=True),  # a single row: a ledger belongs to one study
    sa.Column("identity", JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
)

revisions = sa.Table(
    "revisions",
    metadata,
    sa.Column("revision", sa.Integer, primary_key=True),
    sa.Column("config", JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
)

segments = sa.Table(
    "segments",
    metadata,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("line", sa.String, nullable=False, index=True),  # the same for all lengths of one training
    sa.Column("parent", sa.String),
    sa.Column("numerics", JSON, nullable=False),
    sa.Column("segment", JSON, nullable=False),
    sa.Column("trained_from", sa.BigInteger, nullable=False),  # tokens; earlier tokens belong to other rows of the line
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("loss", sa.Float),  # validation loss of the last weights, nats per token; null after a divergence
    sa.Column("source_losses", JSON, nullable=False),  # the same for each source of a mixture, by name
    sa.Column("averaged_loss", sa.Float),
    sa.Column("diverged_at_step", sa.Integer),
    sa.Column("diverged_because", sa.String),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("state", sa.String),  # path relative to the study's directory; null if no state is kept
    sa.Column("environment", JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
    sa.Index("ix_segments_created_at", "created_at"),  # a live page queries the latest every second
)
# Few of many segments have a state; pruning queries these.
has_state = segments.c.state.is_not(None)
sa.Index("ix_segments_state", segments.c.state, sqlite_where=has_state, postgresql_where=has_state)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("token", sa.Integer, nullable=False),  # fencing token: grows with every owner
    sa.Column("owner", sa.String),  # null when free
    sa.Column("beat", sa.Integer, nullable=False),  # grows while the owner lives
)

rounds = sa.Table(
    "rounds",
    metadata,
    sa.Column("sweep", sa.String, primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),  # 0, and one more for each narrowing
    sa.Column("first_trial", sa.Integer, nullable=False),
    sa.Column("searcher", sa.String, nullable=False),
    sa.Column("space", JSON, nullable=False),
    sa.Column("narrowed", JSON),  # the removed parts of the space, and why
    sa.Column("created_at", sa.String, nullable=False),
)

trials = sa.Table(
    "trials",
    metadata,
    sa.Column("sweep", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("config", JSON, nullable=False),
    sa.Column("until", sa.Integer, nullable=False),  # the rung up to which it first trains
    sa.Column("sequence", sa.Integer, nullable=False),  # among all trials, results and decisions of the sweep
    sa.Column("created_at", sa.String, nullable=False),
    sa.Index("ix_trials_sequence", "sweep", "sequence"),
)

rungs = sa.Table(
    "rungs",
    metadata,
    sa.Column("sweep", sa.String, primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True),
    sa.Column("rung", sa.Integer, primary_key=True),
    sa.Column("sequence", sa.Integer, nullable=False),
    sa.Column("segment", sa.String, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),  # since the rung before
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("loss", sa.Float),  # ranks the trials; null after a divergence
    sa.Column("created_at", sa.String, nullable=False),
    sa.Index("ix_rungs_sequence", "sweep", "sequence"),  # every result queries the last one
)

decisions = sa.Table(
    "decisions",
    metadata,
    sa.Column("sweep", sa.String, primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True),
    sa.Column("rung", sa.Integer, primary_key=True),  # the trial continues from this rung; without a row it does not
    sa.Column("sequence", sa.Integer, nullable=False),
    sa.Column("until", sa.Integer, nullable=False),  # the rung up to which it continues
    sa.Column("path", JSON, nullable=False),  # [first rung, configuration] pairs
    sa.Column("donor", sa.Integer),  # the trial whose state it continues from, if another
    sa.Column("created_at", sa.String, nullable=False),
    sa.Index("ix_decisions_sequence", "sweep", "sequence"),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("purpose", sa.String, primary_key=True),  # sweep, tune, transfer, ladder, compare, full
    sa.Column("key", sa.String, primary_key=True),  # key of the last segment
    sa.Column("stem", sa.String, nullable=False),  # line of the first segment: runs that share it share weights
    sa.Column("d_model", sa.Integer, nullable=False),
    sa.Column("n_layers", sa.Integer, nullable=False),
    sa.Column("n_params", sa.BigInteger, nullable=False),
    sa.Column("n_tokens", sa.BigInteger, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("learning_rate", sa.Float, nullable=False),  # at the base shape
    sa.Column("hyperparameters", JSON, nullable=False),
    sa.Column("label", sa.String, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
    sa.Index("ix_runs_key", "key"),  # for any purpose
    sa.Index("ix_runs_created_at", "created_at"),
)


class ResultKind(StrEnum):
    """Kinds of results, one for each fact without a separate table."""

    CHECK = "check"
    LEAKS = "leaks"  # held-out text in the training text, of each corpus
    NEAR_DUPLICATES = "near_duplicates"  # within the training text, of each corpus
    EVALUATION = "evaluation"  # of one measure, for the weights at one point of a training
    TRANSFER = "transfer"
    COMPARISON = "comparison"  # of the study's variants
    OUTSIDE_RESULTS = "outside_results"  # used by a sweep
    OWN_METHODS = "own_methods"  # searcher and scheduler, if custom
    BAND = "band"
    SCORE_FORECASTS = "score_forecasts"  # registered with a plan
    CONTAMINATION = "contamination"  # items of tasks in the training text, of each corpus
    GATE = "gate"  # of each launch
    SMOKE_TEST = "smoke_test"
    REPLAY = "replay"  # last steps of a run, trained again before it went on
    PROMOTION_STARTED = "promotion_started"
    PROMOTION = "promotion"
    EXTERNAL_RUN_STARTED = "external_run_started"  # when its losses were first read
    EXTERNAL_RUN = "external_run"
    ALARM = "alarm"
    ALARM_WEBHOOK = "alarm_webhook"  # result of posting the alarm
    AMENDMENT_STARTED = "continuation_started"
    AMENDMENT = "continuation"
    FAILURE = "failure"  # a trial, or an annealed run, that failed at every attempt
    CANCEL_TRIAL = "cancel_trial"
    CANCEL_STUDY = "cancel_study"


results = sa.Table(
    "results",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),  # a ResultKind
    sa.Column("key", sa.String, primary_key=True),  # hash of all inputs
    sa.Column("payload", JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
    sa.Index("ix_results_created_at", "kind", "created_at"),  # the latest of a kind
)

forecasts = sa.Table(
    "forecasts",
    metadata,
    sa.Column("plan", sa.String, primary_key=True),
    sa.Column("loss", sa.Float, nullable=False),
    sa.Column("low", sa.Float, nullable=False),
    sa.Column("high", sa.Float, nullable=False),
    sa.Column("level", sa.Float, nullable=False),
    sa.Column("payload", JSON, nullable=False),
    sa.Column("registered_at", sa.String, nullable=False),
)

retrained = sa.Table(
    "retrained",
    metadata,
    sa.Column("key", sa.String, primary_key=True),  # key of a segment whose state had been pruned
    sa.Column("created_at", sa.String, primary_key=True),
    sa.Column("tokens", sa.BigInteger, nullable=False),  # repeated tokens
    sa.Column("seconds", sa.Float, nullable=False),
)

# A forecast that can be edited after the run has no value.
_FINAL = "a registered forecast is final"
REFUSALS = {
    "sqlite": [  # a ledger from elsewhere may have these triggers and no others
        f"CREATE TRIGGER forecasts_refuse_{verb.lower()} BEFORE {verb} ON forecasts BEGIN SELECT RAISE(ABORT, '{_FINAL}'); END"
        for verb in ("UPDATE", "DELETE")
    ],
    "postgresql": [
        "CREATE FUNCTION forecasts_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_FINAL}'; END $$",
        "CREATE TRIGGER forecasts_refuse BEFORE UPDATE OR DELETE OR TRUNCATE ON forecasts "
        "FOR EACH STATEMENT EXECUTE FUNCTION forecasts_refuse()",
    ],
}
for _dialect, _statements in REFUSALS.items():
    for _statement in _statements:
        sa.event.listen(forecasts, "after_create", sa.DDL(_statement).execute_if(dialect=_dialect))  # type: ignore[no-untyped-call]
