-- One row per rollout that fits the search, a page of them in the order asked for: its end, its
-- calls and its sampled tokens. A value that is null asks for nothing; `found` counts all pages.
with
spoken as (
    select
        rollout_id,
        attempt,
        sum(sampled_tokens)::bigint as tokens,
        bool_or(contains(lower(said), lower($said::varchar))) as says
    from calls
    group by rollout_id, attempt
),
ends as (
    select
        split, step, batch, group_id, rollout_id, attempt, attempts, reward, rewarded_error, calls,
        seconds, coalesce(tokens, 0) as tokens,
        error_type || ': ' || error_message as error,
        left(example::varchar, $letters) as example,
        case
            when error_type is not null then 'failed'
            when reward is not null then 'rewarded'
            when ended then 'ended'
            else 'under way'
        end as ended,
        coalesce(says, false) as says
    from rollouts
    left join spoken using (rollout_id, attempt)
)
select
    * exclude (says) replace (left(error, $letters) as error),
    count(*) over () as found
from ends
where ($split::varchar is null or split = $split)
    and ($step::bigint is null or step = $step)
    and ($group::varchar is null or group_id = $group)
    and ($ended::varchar is null or ended = $ended)
    and ($at_least::double is null or reward >= $at_least)
    and ($at_most::double is null or reward <= $at_most)
    and ($shortest::bigint is null or tokens >= $shortest)
    and ($longest::bigint is null or tokens <= $longest)
    and ($error::varchar is null or contains(lower(error), lower($error::varchar)))
    and ($said::varchar is null or says)
order by
    case $order::varchar
        when 'lowest' then reward
        when 'highest' then -reward
        when 'shortest' then tokens
        when 'longest' then -tokens
    end nulls last,
    rollout_id
limit $most
offset $skipped
