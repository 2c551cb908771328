-- A ledger of schema 3, as the first version that migrates made it.
CREATE TABLE decisions (
    sweep VARCHAR NOT NULL,
    trial INTEGER NOT NULL,
    rung INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    until INTEGER NOT NULL,
    path TEXT NOT NULL,
    donor INTEGER,
    created_at VARCHAR NOT NULL,
    PRIMARY KEY (sweep, trial, rung)
);
CREATE TABLE forecasts (
    plan VARCHAR NOT NULL,
    loss FLOAT NOT NULL,
    low FLOAT NOT NULL,
    high FLOAT NOT NULL,
    level FLOAT NOT NULL,
    payload TEXT NOT NULL,
    registered_at VARCHAR NOT NULL,
    PRIMARY KEY (plan)
);
CREATE TABLE leases (
    name VARCHAR NOT NULL,
    token INTEGER NOT NULL,
    owner VARCHAR,
    beat INTEGER NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE results (
    stage VARCHAR NOT NULL,
    key VARCHAR NOT NULL,
    payload TEXT NOT NULL,
    created_at VARCHAR NOT NULL,
    PRIMARY KEY (stage, key)
);
CREATE TABLE retrained (
    key VARCHAR NOT NULL,
    created_at VARCHAR NOT NULL,
    tokens BIGINT NOT NULL,
    seconds FLOAT NOT NULL,
    PRIMARY KEY (key, created_at)
);
CREATE TABLE revisions (
    revision SERIAL NOT NULL,
    config TEXT NOT NULL,
    created_at VARCHAR NOT NULL,
    PRIMARY KEY (revision)
);
CREATE TABLE rounds (
    sweep VARCHAR NOT NULL,
    round INTEGER NOT NULL,
    first_trial INTEGER NOT NULL,
    searcher VARCHAR NOT NULL,
    space TEXT NOT NULL,
    narrowed TEXT,
    created_at VARCHAR NOT NULL,
    PRIMARY KEY (sweep, round)
);
CREATE TABLE rungs (
    sweep VARCHAR NOT NULL,
    trial INTEGER NOT NULL,
    rung INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    segment VARCHAR NOT NULL,
    tokens BIGINT NOT NULL,
    seconds FLOAT NOT NULL,
    loss FLOAT,
    created_at VARCHAR NOT NULL,
    PRIMARY KEY (sweep, trial, rung)
);
CREATE TABLE runs (
    purpose VARCHAR NOT NULL,
    key VARCHAR NOT NULL,
    stem VARCHAR NOT NULL,
    d_model INTEGER NOT NULL,
    n_layers INTEGER NOT NULL,
    n_params BIGINT NOT NULL,
    n_tokens BIGINT NOT NULL,
    seed BIGINT NOT NULL,
    learning_rate FLOAT NOT NULL,
    hyperparameters TEXT NOT NULL,
    label VARCHAR NOT NULL,
    created_at VARCHAR NOT NULL,
    PRIMARY KEY (purpose, key)
);
CREATE TABLE segments (
    key VARCHAR NOT NULL,
    line VARCHAR NOT NULL,
    parent VARCHAR,
    numerics TEXT NOT NULL,
    segment TEXT NOT NULL,
    trained_from BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    loss FLOAT,
    source_losses TEXT NOT NULL,
    averaged_loss FLOAT,
    diverged_at_step INTEGER,
    diverged_because VARCHAR,
    seconds FLOAT NOT NULL,
    state VARCHAR,
    environment TEXT NOT NULL,
    created_at VARCHAR NOT NULL,
    PRIMARY KEY (key)
);
CREATE INDEX ix_segments_line ON segments (line);
CREATE TABLE studies (
    study SERIAL NOT NULL,
    identity TEXT NOT NULL,
    created_at VARCHAR NOT NULL,
    PRIMARY KEY (study)
);
CREATE TABLE trials (
    sweep VARCHAR NOT NULL,
    number INTEGER NOT NULL,
    config TEXT NOT NULL,
    until INTEGER NOT NULL,
    created_at VARCHAR NOT NULL,
    PRIMARY KEY (sweep, number)
);
CREATE FUNCTION forecasts_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'a registered forecast is final'; END $$;
CREATE TRIGGER forecasts_refuse BEFORE UPDATE OR DELETE OR TRUNCATE ON forecasts FOR EACH STATEMENT EXECUTE FUNCTION forecasts_refuse();
CREATE TABLE schema_number (
    number INTEGER NOT NULL
);
INSERT INTO schema_number VALUES (3);
