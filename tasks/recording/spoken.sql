-- What a reply says: its words, and each tool that it calls as name(arguments), a line each.
create or replace temp macro spoken(reply) as concat_ws(
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
