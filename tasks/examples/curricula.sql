-- One row per rollout of sealed batches: its example, and its reward; null if the rollout failed.
select
    filename as batch,
    any_value(attributes ->> '$.example_id')::bigint as example_id,
    arg_max(reward, attempt) filter (where reward_name = 'reward') as reward

from named_parquet_rows($spans)
where kind in ('reward', 'error')
group by filename, rollout_id
order by filename, rollout_id
