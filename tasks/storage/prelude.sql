-- Macros that every query may use.

-- Rows of files, each as it is: no folder's name is a column.
create macro parquet_rows(files) as table
    select * from read_parquet(files, hive_partitioning = false);
create macro json_lines(files) as table
    select * from read_ndjson_objects(files, hive_partitioning = false);

-- Parts of a group's name, <split>-<step>-<example>, as `names.py` writes it.
create macro split_of(group_id) as regexp_extract(group_id, '^(.+)-\d{5,}-\d{4,}$', 1);
create macro place_of(group_id) as regexp_extract(group_id, '\d+$')::bigint;

-- Whether rewards are equal but for rounding, as `is_uniform` of advantages.py says.
create macro is_uniform(least, most) as most - least <= 1e-9 * greatest(abs(least), abs(most));

-- One row per rollout of the table of spans with this name, and per run if the spans name
-- that: the attempt that counts, which is the last one that earned a reward, or else the last one;
-- its reward, and whether it ended with one; null is the reward of an agent that gives none.
create macro rollout_attempts(spans) as table
    select
        columns(lambda name: name in ('run', 'rollout_id')),
        any_value(group_id) as group_id,
        coalesce(
            max(attempt) filter (where reward_name = 'reward'), max(attempt)
        ) as attempt,
        max(attempt) + 1 as attempts,
        arg_max_null(reward, attempt) filter (where reward_name = 'reward') as reward,
        coalesce(bool_or(reward_name = 'reward'), false) as has_ended
    from query_table(spans)
    group by all;

-- What a reply says: its words, and each tool that it calls as name(arguments), a line each.
create macro spoken(reply) as concat_ws(
    chr(10),
    nullif(reply ->> '$.content', ''),
    nullif(
        array_to_string(
            list_transform(
                json_extract(reply, '$.tool_calls[*]'),
                lambda called: concat(
                    called ->> '$.function.name', '(', called ->> '$.function.arguments', ')'
                )
            ),
            chr(10)
        ),
        ''
    )
);
