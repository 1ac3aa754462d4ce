-- One row per rollout of a batch: its reward, null if it failed, and the category of its example.
with

examples as (

    select
        row_number() over () - 1 as place,
        json_extract_string(json, '$.example.category') as category

    from read_ndjson_objects($shard)

),

rollouts as (

    select
        rollout_id,
        any_value(group_id) as group_id,
        arg_max(reward, attempt) filter (where reward_name = 'reward') as reward

    from read_parquet($spans)
    group by rollout_id

)

select
    rollout_id,
    group_id,
    reward,
    category

from rollouts
left join examples on regexp_extract(group_id, '\d+$')::bigint = place
order by rollout_id
