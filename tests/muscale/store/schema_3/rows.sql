INSERT INTO studies (identity, created_at) VALUES ('{"model.d_model": 64}', '2026-11-20T10:00:00.000000+00:00');
INSERT INTO revisions (config, created_at) VALUES ('{"sweep": {"trials": 2}}', '2026-11-20T10:00:00.000000+00:00');
INSERT INTO segments VALUES
    ('s0', 'line 0', NULL, '{"model": {"d_model": 64}, "corpus_key": "c"}', '{"start": 0, "end": 8192}', 0, 8192, 2.5, '{}', 2.4,
     NULL, NULL, 1.5, 'states/s0.pt', '{"device": "cpu"}', '2026-11-20T10:01:00.000000+00:00'),
    ('s1', 'line 1', 's0', '{"model": {"d_model": 64}, "corpus_key": "c"}', '{"start": 8192, "end": 10240}', 8192, 10240, 2.25, '{"wiki": 2.25}', NULL,
     NULL, NULL, 0.5, NULL, '{"device": "cpu"}', '2026-11-20T10:02:00.000000+00:00'),
    ('s2', 'line 2', NULL, '{"model": {"d_model": 64}, "corpus_key": "c"}', '{"start": 0, "end": 8192}', 0, 8192, NULL, '{}', NULL,
     3, 'loss is not finite', 0.25, NULL, '{"device": "cpu"}', '2026-11-20T10:03:00.000000+00:00');
INSERT INTO leases VALUES ('line 0', 1, NULL, 7), ('sweep s', 2, 'host/1', 3);
INSERT INTO rounds VALUES ('s', 0, 0, 'random', '{"learning_rate": {"distribution": "log_uniform", "low": 0.001, "high": 0.1}}', NULL,
    '2026-11-20T10:00:30.000000+00:00');
INSERT INTO trials VALUES
    ('s', 0, '{"learning_rate": 0.01}', 0, '2026-11-20T10:00:40.000000+00:00'),
    ('s', 1, '{"learning_rate": 0.1}', 0, '2026-11-20T10:00:50.000000+00:00');
INSERT INTO rungs VALUES
    ('s', 0, 0, 1, 's0', 8192, 1.5, 2.4, '2026-11-20T10:01:10.000000+00:00'),
    ('s', 1, 0, 2, 's2', 8192, 0.25, NULL, '2026-11-20T10:03:10.000000+00:00');
INSERT INTO decisions VALUES ('s', 0, 0, 3, 1, '[[0, {"learning_rate": 0.01}]]', NULL, '2026-11-20T10:03:20.000000+00:00');
INSERT INTO runs VALUES ('sweep', 's1', 'line 0', 64, 2, 98304, 10240, 0, 0.01, '{"learning_rate": 0.01}', 'trial 0, rung 0',
    '2026-11-20T10:02:10.000000+00:00');
INSERT INTO results VALUES
    ('check', 'k', '{"passed": true}', '2026-11-20T10:00:20.000000+00:00'),
    ('transfer', 'k', '{"drift": NaN}', '2026-11-20T10:05:00.000000+00:00');
INSERT INTO forecasts VALUES ('p', 2.0, 1.9, 2.1, 0.9, '{"n_params": 98304}', '2026-11-20T10:06:00.000000+00:00');
INSERT INTO retrained VALUES ('s0', '2026-11-20T10:07:00.000000+00:00', 8192, 1.5);
