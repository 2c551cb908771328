"""The ledger's tables, one for each kind of fact."""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA = 3  # raise it when a table or what a column holds changes: an older ledger is then refused

metadata = sa.MetaData()

studies = sa.Table(
    "studies",
    metadata,
    sa.Column("study", sa.Integer, primary_key=True),  # one row: a ledger is one study's
    sa.Column("identity", sa.JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
)

revisions = sa.Table(
    "revisions",
    metadata,
    sa.Column("revision", sa.Integer, primary_key=True),
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
)

segments = sa.Table(
    "segments",
    metadata,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("line", sa.String, nullable=False, index=True),  # the same training up to another end
    sa.Column("parent", sa.String),
    sa.Column("numerics", sa.JSON, nullable=False),
    sa.Column("segment", sa.JSON, nullable=False),
    sa.Column(
        "trained_from", sa.Integer, nullable=False
    ),  # tokens; earlier ones were trained by another row of the line
    sa.Column("tokens", sa.Integer, nullable=False),
    sa.Column("loss", sa.Float),  # validation, last weights, nats per token; null after a divergence
    sa.Column("source_losses", sa.JSON, nullable=False),  # the same of each source of a mixture, by name
    sa.Column("averaged_loss", sa.Float),
    sa.Column("diverged_at_step", sa.Integer),
    sa.Column("diverged_because", sa.String),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("state", sa.String),  # path relative to the study's directory; null where none is kept
    sa.Column("environment", sa.JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("token", sa.Integer, nullable=False),  # fencing: grows with every owner
    sa.Column("owner", sa.String),  # null when free
    sa.Column("beat", sa.Integer, nullable=False),  # grows while the owner lives
)

rounds = sa.Table(
    "rounds",
    metadata,
    sa.Column("sweep", sa.String, primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),  # 0, and one more for each narrowing
    sa.Column("first_trial", sa.Integer, nullable=False),
    sa.Column("trials", sa.Integer, nullable=False),
    sa.Column("searcher", sa.String, nullable=False),
    sa.Column("space", sa.JSON, nullable=False),
    sa.Column("narrowed", sa.JSON),  # what was cut, and why
    sa.Column("created_at", sa.String, nullable=False),
)

trials = sa.Table(
    "trials",
    metadata,
    sa.Column("sweep", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("until", sa.Integer, nullable=False),  # the rung up to which it was begun
    sa.Column("created_at", sa.String, nullable=False),
)

rungs = sa.Table(
    "rungs",
    metadata,
    sa.Column("sweep", sa.String, primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True),
    sa.Column("rung", sa.Integer, primary_key=True),
    sa.Column("sequence", sa.Integer, nullable=False),  # of all results and decisions of the sweep
    sa.Column("segment", sa.String, nullable=False),
    sa.Column("tokens", sa.Integer, nullable=False),  # from the rung before
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("loss", sa.Float),  # that trials are ranked by; null after a divergence
    sa.Column("created_at", sa.String, nullable=False),
)

decisions = sa.Table(
    "decisions",
    metadata,
    sa.Column("sweep", sa.String, primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True),
    sa.Column("rung", sa.Integer, primary_key=True),  # from which it goes on; without a row it does not
    sa.Column("sequence", sa.Integer, nullable=False),
    sa.Column("until", sa.Integer, nullable=False),  # the rung up to which it goes on
    sa.Column("path", sa.JSON, nullable=False),  # [first rung, configuration] pairs
    sa.Column("donor", sa.Integer),  # the trial whose state it goes on from, where that is another's
    sa.Column("created_at", sa.String, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("purpose", sa.String, primary_key=True),  # sweep, transfer, ladder, full
    sa.Column("key", sa.String, primary_key=True),  # of the last segment
    sa.Column("stem", sa.String, nullable=False),  # line of the first segment: runs that share it share weights
    sa.Column("d_model", sa.Integer, nullable=False),
    sa.Column("n_layers", sa.Integer, nullable=False),
    sa.Column("n_params", sa.Integer, nullable=False),
    sa.Column("n_tokens", sa.Integer, nullable=False),
    sa.Column("seed", sa.Integer, nullable=False),
    sa.Column("learning_rate", sa.Float, nullable=False),  # at the base shape
    sa.Column("hyperparameters", sa.JSON, nullable=False),
    sa.Column("label", sa.String, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
)

results = sa.Table(
    "results",
    metadata,
    sa.Column("stage", sa.String, primary_key=True),
    sa.Column("key", sa.String, primary_key=True),  # hash of all inputs
    sa.Column("payload", sa.JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
)

forecasts = sa.Table(
    "forecasts",
    metadata,
    sa.Column("plan", sa.String, primary_key=True),
    sa.Column("loss", sa.Float, nullable=False),
    sa.Column("low", sa.Float, nullable=False),
    sa.Column("high", sa.Float, nullable=False),
    sa.Column("level", sa.Float, nullable=False),
    sa.Column("payload", sa.JSON, nullable=False),
    sa.Column("registered_at", sa.String, nullable=False),
)

# A forecast that could be edited after the run would be worth nothing.
for _verb in ("UPDATE", "DELETE"):
    sa.event.listen(
        forecasts,
        "after_create",
        sa.DDL(  # type: ignore[no-untyped-call]
            f"CREATE TRIGGER forecasts_refuse_{_verb.lower()} BEFORE {_verb} ON forecasts "
            "BEGIN SELECT RAISE(ABORT, 'a registered forecast is final'); END"
        ),
    )
