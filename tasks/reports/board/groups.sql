-- One row per group that fits the search, a page of them: its rewards and its example. A value that
-- is null asks for nothing; `found` counts all pages.
with
examples as (
    select
        group_id,
        left(any_value(example::varchar), $letters) as example
    from rollouts
    group by group_id
)
select
    groups.* exclude (run),
    example,
    count(*) over () as found
from groups
left join examples using (group_id)
where ($split::varchar is null or split = $split)
    and ($step::bigint is null or step = $step)
    and (
        $rewards::varchar is null
        or $rewards = case when uniform is null then 'none' when uniform then 'equal' else 'different' end
    )
order by step desc, group_id
limit $most
offset $skipped
